/* An allocator that notices every access beyond a block: each ends at a page that may not be touched.

       cc -O2 -shared -fPIC -o fence.so fence.c -ldl && LD_PRELOAD=./fence.so python ...

   Only posix_memalign is replaced, which is what torch and oneDNN allocate tensors and scratch memory with. Blocks lie in a
   reserved range of addresses. What alignment leaves between a block's end and the page is filled, and looked at when the block
   is freed. A touched page is a segmentation fault; a changed filling says so and aborts.

   The addresses of blocks that are larger than a page are never used twice. A page is, because most blocks have no more and
   asking the kernel for another costs more than all else: it is filled when it is freed, and looked at before it is used. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define RESERVED ((size_t)16 << 40)
#define PAGE ((size_t)4096)
#define FILLING 0xA5

static char *base, *next_free;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*real_free)(void *);
static void *(*real_realloc)(void *, size_t);
static size_t (*real_usable)(void *);

typedef struct Head {
    char *start, *end; /* of the pages that may be used */
    size_t size;
    struct Head *next; /* after this one among the pages that were freed; NULL in use */
} Head;

static Head none, *freed = &none;

static void begin(void) {
    real_free = dlsym(RTLD_NEXT, "free");
    real_realloc = dlsym(RTLD_NEXT, "realloc");
    real_usable = dlsym(RTLD_NEXT, "malloc_usable_size");
    base = mmap(NULL, RESERVED, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) abort();
    next_free = base;
}

static int ours(const void *p) { return base && (const char *)p >= base && (const char *)p < base + RESERVED; }

/* A block's description lies in a page of its own below it: [head page][pages of the block][page that may not be touched] */
static Head *head_of(const void *p) {
    char *page = (char *)((uintptr_t)p & ~(PAGE - 1));
    return (Head *)(page - PAGE);
}

static int is_page(size_t size) { return size && size <= PAGE; }

static void end_with(const char *said) {
    if (write(2, said, strlen(said))) {}
    abort();
}

static void check(const char *from, const char *end) {
    if (from < end && ((unsigned char)*from != FILLING || memcmp(from, from + 1, end - from - 1)))
        end_with("fence: something was written beyond the end of a block\n");
}

/* The first of so many new pages, and of one before and one behind them. */
static char *find_new(size_t pages) {
    pthread_mutex_lock(&lock);
    char *start = next_free;
    next_free += PAGE + pages + PAGE;
    pthread_mutex_unlock(&lock);
    if (next_free > base + RESERVED || mprotect(start, PAGE + pages, PROT_READ | PROT_WRITE)) return NULL;
    return start;
}

/* The first of a page that was freed, if there is one, and of the pages before and behind it. */
static char *find_freed(void) {
    pthread_mutex_lock(&lock);
    Head *head = freed;
    if (head != &none) freed = head->next;
    pthread_mutex_unlock(&lock);
    if (head == &none) return NULL;
    check(head->end - PAGE, head->end);
    return head->start;
}

int posix_memalign(void **result, size_t alignment, size_t size) {
    pthread_once(&once, begin);
    if (alignment > PAGE) alignment = PAGE;
    size_t pages = (size + PAGE - 1) / PAGE * PAGE;
    if (!pages) pages = PAGE;
    char *start = is_page(size) ? find_freed() : NULL;
    if (!start) start = find_new(pages);
    if (!start) return ENOMEM;
    char *end = start + PAGE + pages;
    char *block = (char *)((uintptr_t)(end - size) & ~(alignment - 1));
    *head_of(block) = (Head){start, end, size, NULL};
    memset(block + size, FILLING, end - block - size);
    *result = block;
    return 0;
}

void free(void *p) {
    if (!ours(p)) {
        pthread_once(&once, begin);
        real_free(p);
        return;
    }
    Head *head = head_of(p);
    if (head->next) end_with("fence: a block was freed twice\n");
    check((char *)p + head->size, head->end);
    if (is_page(head->size)) {
        memset(head->end - PAGE, FILLING, PAGE);
        pthread_mutex_lock(&lock);
        head->next = freed;
        freed = head;
        pthread_mutex_unlock(&lock);
    } else {
        char *start = head->start;
        size_t length = head->end - start;
        madvise(start, length, MADV_DONTNEED);
        mprotect(start, length, PROT_NONE);
    }
}

void *realloc(void *p, size_t size) {
    pthread_once(&once, begin);
    if (!ours(p)) return real_realloc(p, size);
    void *new = NULL;
    if (posix_memalign(&new, 64, size)) return NULL;
    size_t before = head_of(p)->size;
    memcpy(new, p, before < size ? before : size);
    free(p);
    return new;
}

size_t malloc_usable_size(void *p) {
    pthread_once(&once, begin);
    return ours(p) ? head_of(p)->size : real_usable(p);
}
