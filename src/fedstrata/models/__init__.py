"""What is a model made of, what does it cost, and what does it see?

- `registry` builds the models of the `zoo` by name; `submodels` reads the architectures that a run's clients have, and
  `isolated_architectures` puts them side by side.
- `strata` finds a model's layer groups (from `units`, in the order that `passes` show); `stages` are the children of a
  sequential one.
- `taps` looks at a module while it runs; `frozen_prefix` cuts off what lies below everything that trains.
- `norms` and `layouts` know what norm layers and convolutions need; `flops`, `receptive` and `summary` tell what a
  model costs and sees.
"""
