/* A slow disk for a process and its children, without root: LD_PRELOAD this, with the rate in bytes a second in
 * STEPWELL_BENCH_DISK_RATE. Each large write to a regular file waits its turn, in each process by itself; with a file
 * of 8 bytes in STEPWELL_BENCH_DISK_SHARED all processes share one disk. No lock: a process may be stopped at any time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static _Atomic long long own, *free_at = &own;
static double rate;

__attribute__((constructor)) static void begin(void) {
    const char *given = getenv("STEPWELL_BENCH_DISK_RATE"), *path = getenv("STEPWELL_BENCH_DISK_SHARED");
    rate = given ? atof(given) : 1e18;
    int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
    void *found = fd < 0 ? MAP_FAILED : mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (found != MAP_FAILED)
        free_at = found;
    if (fd >= 0)
        close(fd);
}

static ssize_t pay(int fd, ssize_t bytes) {
    struct stat found;
    struct timespec t;
    if (bytes < 65536 || fstat(fd, &found) || !S_ISREG(found.st_mode))
        return bytes;
    clock_gettime(CLOCK_MONOTONIC, &t);
    long long now = t.tv_sec * 1000000000LL + t.tv_nsec, was = atomic_load(free_at), next;
    do
        next = (was > now ? was : now) + (long long)(1e9 * bytes / rate);
    while (!atomic_compare_exchange_weak(free_at, &was, next));
    t.tv_sec = (next - now) / 1000000000LL, t.tv_nsec = (next - now) % 1000000000LL;
    nanosleep(&t, NULL);
    return bytes;
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t count) {
    REAL(write);
    return pay(fd, real(fd, data, count));
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    return pay(fd, real(fd, parts, count));
}

ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    REAL(pwrite);
    return pay(fd, real(fd, data, count, at));
}

ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    REAL(pwrite64);
    return pay(fd, real(fd, data, count, at));
}
