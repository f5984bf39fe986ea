/* A slow disk for a process and its children, without root: LD_PRELOAD this, with the rate in bytes a second in
 * STEPWELL_BENCH_DISK_RATE. Each large write to a regular file waits its turn, in each process by itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static double free_at, rate;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static ssize_t pay(int fd, ssize_t bytes) {
    struct stat found;
    if (bytes < 65536 || fstat(fd, &found) || !S_ISREG(found.st_mode))
        return bytes;
    pthread_mutex_lock(&lock);
    if (rate == 0)
        rate = getenv("STEPWELL_BENCH_DISK_RATE") ? atof(getenv("STEPWELL_BENCH_DISK_RATE")) : 1e18;
    double start = now();
    free_at = (free_at > start ? free_at : start) + bytes / rate;
    double left = free_at - start;
    pthread_mutex_unlock(&lock);
    struct timespec t = {(time_t)left, (long)((left - (time_t)left) * 1e9)};
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
