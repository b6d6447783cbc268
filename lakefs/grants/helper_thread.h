/* A thread that helps another with a job, without the interpreter: one job at a time, cut into parts that both take.

       caller: begin  ->  works on the job itself  ->  end        helper: woken  ->  works on the same job

   Rules kept here:
   - Nobody waits for the helper to wake: whoever calls `end` before it has begun takes the job back.
   - A job's memory is used between `begin` and `end` only.
   - One caller at a time: `begin` returns 0 to others, who do their jobs alone.
   - In a child of fork there is no such thread: `begin` returns 0, and `close` does nothing.
   - The thread takes no signals: handlers of the host run where they ran before. */
#ifndef LAKE_HELPER_THREAD_H
#define LAKE_HELPER_THREAD_H

#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <unistd.h>

#define HELPER_STACK_BYTES (1 << 20)
#define HELPER_SPINS 4000 /* looks at the helper's last part before its caller sleeps: some 10 us */

enum { HELPER_IDLE, HELPER_POSTED, HELPER_RUNNING, HELPER_DONE };

typedef struct {
    pthread_t thread;
    pthread_mutex_t turn; /* held by the caller from `begin` to `end` */
    pthread_mutex_t lock; /* of what follows */
    pthread_cond_t posted, done;
    void (*work)(void *);
    void *job;
    int state;
    int is_ending;
    pid_t owner; /* 0: no thread */
} helper_thread;

static inline void helper_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void *helper_run(void *at)
{
    helper_thread *helper = at;
    pthread_mutex_lock(&helper->lock);
    for (;;) {
        while (helper->state != HELPER_POSTED && !helper->is_ending)
            pthread_cond_wait(&helper->posted, &helper->lock);
        if (helper->state != HELPER_POSTED)
            break;
        __atomic_store_n(&helper->state, HELPER_RUNNING, __ATOMIC_RELEASE);
        pthread_mutex_unlock(&helper->lock);
        helper->work(helper->job);
        pthread_mutex_lock(&helper->lock);
        __atomic_store_n(&helper->state, HELPER_DONE, __ATOMIC_RELEASE);
        pthread_cond_signal(&helper->done);
    }
    pthread_mutex_unlock(&helper->lock);
    return NULL;
}

/* Starts the thread; returns 0, or the error's number. */
static int helper_start(helper_thread *helper)
{
    pthread_attr_t attributes;
    sigset_t all, before;
    pthread_mutex_init(&helper->turn, NULL);
    pthread_mutex_init(&helper->lock, NULL);
    pthread_cond_init(&helper->posted, NULL);
    pthread_cond_init(&helper->done, NULL);
    helper->state = HELPER_IDLE;
    helper->is_ending = 0;
    int failed = pthread_attr_init(&attributes);
    if (failed)
        return failed;
    pthread_attr_setstacksize(&attributes, HELPER_STACK_BYTES);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&helper->thread, &attributes, helper_run, helper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (!failed)
        pthread_setname_np(helper->thread, "lake-helper");
    helper->owner = failed ? 0 : getpid();
    return failed;
}

/* Offers a job to the helper; returns 0 if it is not to be had.  After 1, call `helper_end`. */
static int helper_begin(helper_thread *helper, void (*work)(void *), void *job)
{
    if (helper->owner != getpid() || pthread_mutex_trylock(&helper->turn))
        return 0;
    pthread_mutex_lock(&helper->lock);
    if (helper->is_ending) {
        pthread_mutex_unlock(&helper->lock);
        pthread_mutex_unlock(&helper->turn);
        return 0;
    }
    helper->work = work;
    helper->job = job;
    __atomic_store_n(&helper->state, HELPER_POSTED, __ATOMIC_RELEASE);
    pthread_cond_signal(&helper->posted);
    pthread_mutex_unlock(&helper->lock);
    return 1;
}

/* Takes the job back, or waits until the helper has done its part of it. */
static void helper_end(helper_thread *helper)
{
    for (int spin = 0; spin < HELPER_SPINS; spin++) {
        if (__atomic_load_n(&helper->state, __ATOMIC_ACQUIRE) != HELPER_RUNNING)
            break;
        helper_pause();
    }
    pthread_mutex_lock(&helper->lock);
    while (helper->state == HELPER_RUNNING)
        pthread_cond_wait(&helper->done, &helper->lock);
    __atomic_store_n(&helper->state, HELPER_IDLE, __ATOMIC_RELEASE);
    helper->job = NULL;
    pthread_mutex_unlock(&helper->lock);
    pthread_mutex_unlock(&helper->turn);
}

/* Ends the thread, after the job under way; idempotent.  No job is taken afterwards. */
static void helper_close(helper_thread *helper)
{
    if (!helper->owner || helper->owner != getpid())
        return;
    pthread_mutex_lock(&helper->lock);
    int is_first = !helper->is_ending;
    helper->is_ending = 1;
    pthread_cond_signal(&helper->posted);
    pthread_mutex_unlock(&helper->lock);
    if (is_first)
        pthread_join(helper->thread, NULL);
}

#endif
