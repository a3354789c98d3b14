/* What tests/bench/machine.py asks of two cores: how far apart they are, and how fast they read memory together. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BATCHES = 10, HANDOVERS = 500, PASSES = 3, THREADS_MAX = 64 };

static double now_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set); /* refused: the figure is then of wherever it ran */
}

static _Alignas(128) atomic_int turn;

struct player {
    int cpu, me;
    double best_s; /* of one batch */
};

static void *play(void *argument) {
    struct player *p = argument;
    pin(p->cpu);
    int value = 0;
    for (int batch = 0; batch < BATCHES; batch++) {
        double began = now_s();
        for (int i = 0; i < HANDOVERS; i++, value += 2) {
            while (atomic_load_explicit(&turn, memory_order_acquire) != value + p->me) {
            }
            atomic_store_explicit(&turn, value + p->me + 1, memory_order_release);
        }
        double took = now_s() - began;
        if (batch == 0 || took < p->best_s) p->best_s = took;
    }
    return NULL;
}

/* Nanoseconds until a store on one core is seen on the other: the best batch, because a preempted one tells nothing. */
double machine_handover_ns(int cpu_a, int cpu_b) {
    struct player players[2] = {{cpu_a, 0, 0}, {cpu_b, 1, 0}};
    pthread_t other;
    atomic_store(&turn, 0);
    if (pthread_create(&other, NULL, play, &players[1])) return -1;
    pthread_t mine; /* a thread of its own, so that the caller keeps its affinity */
    if (pthread_create(&mine, NULL, play, &players[0])) abort(); /* the other one would wait for ever */
    pthread_join(mine, NULL);
    pthread_join(other, NULL);
    return players[0].best_s / HANDOVERS / 2 * 1e9;
}

struct reader {
    const uint64_t *part;
    long words;
    int cpu;
    pthread_barrier_t *gate;
    double began[PASSES], ended[PASSES];
    uint64_t sum; /* so that the compiler cannot leave the reading out */
};

static void *read_part(void *argument) {
    struct reader *r = argument;
    pin(r->cpu);
    memset((void *)r->part, 1, r->words * sizeof(uint64_t));
    for (int pass = 0; pass < PASSES; pass++) {
        pthread_barrier_wait(r->gate);
        r->began[pass] = now_s();
        uint64_t sum = 0;
        for (long i = 0; i < r->words; i++) sum ^= r->part[i];
        r->sum += sum;
        r->ended[pass] = now_s();
    }
    return NULL;
}

/* Gigabytes per second that `threads` threads, one on each of `cpus`, read out of `bytes` of memory: the best pass. */
double machine_read_gbs(const int *cpus, int threads, long bytes) {
    if (threads < 1 || threads > THREADS_MAX) return -1;
    struct reader readers[THREADS_MAX];
    pthread_t ids[THREADS_MAX];
    pthread_barrier_t gate;
    long words = bytes / threads / 64 * 8;
    uint64_t *memory = aligned_alloc(64, (size_t)words * 8 * threads);
    if (!memory) return -1;
    pthread_barrier_init(&gate, NULL, threads);
    for (int i = 0; i < threads; i++) {
        readers[i] = (struct reader){.part = memory + i * words, .words = words, .cpu = cpus[i], .gate = &gate};
        if (pthread_create(&ids[i], NULL, read_part, &readers[i])) abort();
    }
    double best = 0;
    for (int i = 0; i < threads; i++) pthread_join(ids[i], NULL);
    for (int pass = 0; pass < PASSES; pass++) {
        double began = readers[0].began[pass], ended = readers[0].ended[pass];
        for (int i = 1; i < threads; i++) {
            if (readers[i].began[pass] < began) began = readers[i].began[pass];
            if (readers[i].ended[pass] > ended) ended = readers[i].ended[pass];
        }
        double rate = words * 8.0 * threads / (ended - began) / 1e9;
        if (rate > best) best = rate;
    }
    pthread_barrier_destroy(&gate);
    free(memory);
    return best;
}
