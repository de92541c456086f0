/* Shifts the wall clock of the processes that load this library (LD_PRELOAD), at any time, by a file of two numbers.
 *
 * The file CLOCK_SHIM_FILE holds two 64-bit integers, seconds: the shift of processes whose command line contains
 * CLOCK_SHIM_RANKS, and that of all others. It is mapped, so that a new number takes effect at the next look at the
 * clock. Clocks that do not jump (CLOCK_MONOTONIC, CLOCK_BOOTTIME) stay as they are, as when a real clock is set.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *shift_s;

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("CLOCK_SHIM_FILE");
    const char *ranks = getenv("CLOCK_SHIM_RANKS");
    char words[1 << 16];
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return;
    int command = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    ssize_t length = command < 0 ? 0 : read(command, words, sizeof words);
    if (command >= 0) close(command);
    int is_rank = ranks && length > 0 && memmem(words, (size_t)length, ranks, strlen(ranks)) != NULL;
    shift_s = (const volatile int64_t *)mapped + (is_rank ? 0 : 1);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0 && shift_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += *shift_s;
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (result) *result = precise.tv_sec;
    return precise.tv_sec;
}
