/* Counts the bytes that PyTorch's CPU allocator takes from the C library and has not given back: preloaded, so that
 * Pooch is measured by something that shares no code with it. What other libraries take is left out: only calls that
 * come from the watched range of code (libc10.so) count. */
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

extern "C" {

void *__libc_memalign(size_t alignment, size_t size) noexcept;
void __libc_free(void *block) noexcept;

#define SLOTS (1u << 21)
static struct { uintptr_t block; size_t size; } table[SLOTS];
static uintptr_t first_code, last_code;
static int64_t live_bytes, peak_bytes;
static uint32_t blocks;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void lock(void) { pthread_mutex_lock(&mutex); }
static void unlock(void) { pthread_mutex_unlock(&mutex); }
__attribute__((constructor)) static void keep_forks_unlocked(void) { pthread_atfork(lock, unlock, unlock); }

static uint32_t home(uintptr_t block) { return (uint32_t)((block >> 6) * 0x9E3779B97F4A7C15ull >> 43) & (SLOTS - 1); }

static void insert(uintptr_t block, size_t size) {
    if (blocks > SLOTS / 2) abort();
    uint32_t slot = home(block);
    while (table[slot].block) slot = (slot + 1) & (SLOTS - 1);
    table[slot].block = block;
    table[slot].size = size;
    blocks++;
    live_bytes += size;
    if (live_bytes > peak_bytes) peak_bytes = live_bytes;
}

static void erase(uintptr_t block) {
    uint32_t slot = home(block);
    while (table[slot].block != block) {
        if (!table[slot].block) return; /* not one of ours */
        slot = (slot + 1) & (SLOTS - 1);
    }
    live_bytes -= table[slot].size;
    blocks--;
    for (uint32_t hole = slot;;) { /* close the gap, so that a search ends at the first empty slot */
        slot = (slot + 1) & (SLOTS - 1);
        if (!table[slot].block) { table[hole].block = 0; return; }
        uint32_t distance = (slot - home(table[slot].block)) & (SLOTS - 1);
        if (distance >= ((slot - hole) & (SLOTS - 1))) { table[hole] = table[slot]; hole = slot; }
    }
}

int posix_memalign(void **result, size_t alignment, size_t size) noexcept {
    uintptr_t caller = (uintptr_t)__builtin_return_address(0);
    void *block = __libc_memalign(alignment, size);
    if (!block) return ENOMEM;
    *result = block;
    if (caller >= first_code && caller < last_code) {
        lock();
        insert((uintptr_t)block, size);
        unlock();
    }
    return 0;
}

void free(void *block) noexcept {
    if (block && last_code && !((uintptr_t)block & 63)) {
        lock();
        erase((uintptr_t)block);
        unlock();
    }
    __libc_free(block);
}

void counting_watch(uintptr_t first, uintptr_t last) { first_code = first; last_code = last; }
int64_t counting_live_bytes(void) { return live_bytes; }
int64_t counting_peak_bytes(void) { return peak_bytes; }
void counting_begin_peak(void) { lock(); peak_bytes = live_bytes; unlock(); }

}  // extern "C"
