// Threads of ours take no signals: those belong to the process's own threads.
#pragma once

#include <pthread.h>

#include <csignal>

namespace kvferry {

// Every signal is blocked while one exists, and in the threads started meanwhile for good.
class SignalsBlocked {
  public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

  private:
    sigset_t before_{};
};

}  // namespace kvferry
