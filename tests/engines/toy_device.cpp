// Two devices that are not the CPU, for tests on machines without a GPU: memory of the host under another name.
//
// Kernels are those of the CPU, so results have its bits. But a kernel takes tensors of one device only, as a GPU's
// would, single numbers excepted: whatever was left behind on the CPU, or is on the other device, is an error.

#include <ATen/EmptyTensor.h>
#include <ATen/InferSize.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm.h>
#include <torch/library.h>

namespace {

using at::IntArrayRef;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;
constexpr auto TOY = c10::DeviceType::PrivateUse1;
constexpr c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
constexpr c10::DeviceIndex COUNT = 2;

thread_local c10::DeviceIndex current = 0;

struct OnDevice {  // inside, new tensors are on a device
  c10::DeviceIndex before = current;
  explicit OnDevice(std::optional<at::Device> device) {
    if (device && device->has_index()) current = device->index();
  }
  ~OnDevice() { current = before; }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TOY; }
  c10::Device getDevice() const override { return {TOY, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return COUNT; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* place = bytes ? c10::alloc_cpu(bytes) : nullptr;
    return {place, place, &c10::free_cpu, c10::Device(TOY, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::free_cpu; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};
Memory memory;
REGISTER_ALLOCATOR(TOY, &memory);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return COUNT; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
};

// What touches memory itself --------------------------------------------------------------------------------------

Tensor on_host(const Tensor& tensor) {  // the same memory, as the CPU's kernels know it
  if (tensor.is_cpu()) return tensor;
  auto* begin = static_cast<char*>(tensor.storage().mutable_data()) + tensor.storage_offset() * tensor.element_size();
  return at::from_blob(begin, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).requires_grad(false));
}

MaybeTensor on_host(const MaybeTensor& tensor) {
  return tensor && tensor->defined() ? MaybeTensor(on_host(*tensor)) : std::nullopt;
}

Tensor to_toy(const Tensor& tensor, at::Device device) { return tensor.defined() ? tensor.to(device) : tensor; }

Tensor empty(IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>,
             std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice on(device);
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(type), format);
}

Tensor empty_strided(IntArrayRef size, IntArrayRef strides, std::optional<at::ScalarType> type,
                     std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice on(device);
  return at::detail::empty_strided_generic(size, strides, &memory, KEYS, c10::dtype_or_default(type));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  on_host(to).copy_(on_host(from));
  return to;
}

const Tensor& resize(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_sizes_contiguous(size);
  const size_t bytes = (tensor->numel() + tensor->storage_offset()) * tensor->itemsize();
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    OnDevice on(self.device());
    auto longer = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(longer.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(longer));
    storage.set_nbytes(bytes);
  }
  return self;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

Tensor alias(const Tensor& self, IntArrayRef size, IntArrayRef strides, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, strides);
  view.unsafeGetTensorImpl()->set_storage_offset(offset.value_or(self.storage_offset()));
  return view;
}

Tensor view(const Tensor& self, IntArrayRef wanted) {
  auto size = at::infer_size_dv(wanted, self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), size);
  TORCH_CHECK(strides.has_value(), "no view of this tensor has that size");
  return alias(self, size, *strides, std::nullopt);
}

Tensor reshape_alias(const Tensor& self, IntArrayRef size, IntArrayRef strides) {
  return alias(self, size, strides, std::nullopt);
}

at::Scalar to_number(const Tensor& self) { return on_host(self).item(); }

// What torch does not leave to a fallback, or what writes to its arguments without saying so ------------------------

Tensor convolve(const Tensor& x, const Tensor& w, const MaybeTensor& bias, c10::SymIntArrayRef stride,
                c10::SymIntArrayRef padding, c10::SymIntArrayRef dilation, bool transposed,
                c10::SymIntArrayRef more, c10::SymInt groups) {
  TORCH_CHECK(x.device() == w.device(), "tensors of several devices in a convolution");
  auto out = at::convolution_symint(
      on_host(x), on_host(w), on_host(bias), stride, padding, dilation, transposed, more, groups);
  return to_toy(out, x.device());
}

std::tuple<Tensor, Tensor, Tensor> convolve_back(
    const Tensor& grad, const Tensor& x, const Tensor& w, c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
    c10::SymIntArrayRef dilation, bool transposed, c10::SymIntArrayRef more, c10::SymInt groups,
    std::array<bool, 3> wanted) {
  std::vector<c10::SymInt> bias{w.sym_size(transposed ? 1 : 0)};
  auto [dx, dw, db] = at::convolution_backward_symint(
      on_host(grad), on_host(x), on_host(w), c10::SymIntArrayRef(bias), stride, padding, dilation, transposed, more,
      groups, wanted);
  return {to_toy(dx, x.device()), to_toy(dw, x.device()), to_toy(db, x.device())};
}

std::tuple<Tensor, Tensor, Tensor> batch_norm(
    const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, const MaybeTensor& mean,
    const MaybeTensor& variance, bool training, double momentum, double eps) {
  auto [out, saved_mean, saved_scale] = at::native_batch_norm(
      on_host(x), on_host(weight), on_host(bias), on_host(mean), on_host(variance), training, momentum, eps);
  return {to_toy(out, x.device()), to_toy(saved_mean, x.device()), to_toy(saved_scale, x.device())};
}

// Everything else ---------------------------------------------------------------------------------------------------

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  c10::DeviceIndex index = -1;
  bool host = false, both = false;
  auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    if (tensor.is_cpu()) {
      host |= tensor.dim() > 0;
    } else {
      both |= index >= 0 && index != tensor.get_device();
      index = tensor.get_device();
    }
  };
  for (const auto& value : torch::jit::last(*stack, operation.schema().arguments().size())) {
    if (value.isTensor()) look(value.toTensor());
    if (value.isTensorList()) for (const Tensor& tensor : value.toTensorVector()) look(tensor);
  }
  TORCH_CHECK(!both && !(host && index >= 0), "tensors of several devices in ", operation.schema().name());
  OnDevice on(index < 0 ? std::nullopt : std::optional<at::Device>(at::Device(TOY, index)));
  at::native::cpu_fallback(operation, stack, false);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("resize_", resize);
  m.impl("as_strided", alias);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("_local_scalar_dense", to_number);
  m.impl("convolution_overrideable", convolve);
  m.impl("convolution_backward_overrideable", convolve_back);
  m.impl("native_batch_norm", batch_norm);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

}  // namespace

const bool HOOKS = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);
