// kill -9 at any instruction, some hundred times: a forked owner works on the pool without end, the
// parent kills it at a random moment, attaches and verifies every byte that is ready.
#include <signal.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <random>
#include <vector>

#include "pool_bytes.h"

namespace {

using namespace kvferry_test;

class Owner {
  public:
    Owner(int fd, uint64_t seed) : pool_(Pool::attach(fd, seed)), random_(seed) {}

    // Writes a byte to `working` once it has worked for a while.
    [[noreturn]] void work(int working) {
        for (int turn = 0;; ++turn) {
            if (turn == 8) {
                CHECK(::write(working, "w", 1) == 1);
            }
            const uint64_t first = random_() % (kUniverse - 15);
            std::vector<uint64_t> numbers;
            for (uint64_t i = 0; i <= random_() % 5; ++i) {
                numbers.push_back(first + 3 * i);
            }
            if (random_() % 5 < 3) {
                save(numbers);
            } else {
                use(numbers);
            }
        }
    }

  private:
    static std::vector<Key> to_keys(const std::vector<uint64_t>& numbers) {
        std::vector<Key> keys;
        for (const uint64_t n : numbers) {
            keys.push_back(key_of(n));
        }
        return keys;
    }

    void save(const std::vector<uint64_t>& numbers) {
        const std::vector<Key> keys = to_keys(numbers);
        std::vector<int64_t> got(keys.size());
        pool_->reserve({keys.data(), keys.size()}, payload_of(numbers[0]), 1, got.data());
        std::vector<uint32_t> taken;
        for (size_t i = 0; i < got.size(); ++i) {
            if (got[i] >= 0) {
                taken.push_back(static_cast<uint32_t>(got[i]));
                const uint32_t crc = fill_bytes(*pool_, numbers[i], taken.back());
                pool_->set_crcs({&taken.back(), 1}, 0, &crc);
            }
        }
        if (random_() % 10 == 0) {
            pool_->abort(taken);
        } else {
            pool_->commit(taken);
        }
    }

    void use(const std::vector<uint64_t>& numbers) {
        const std::vector<Key> keys = to_keys(numbers);
        leases_.push_back(pool_->lease({keys.data(), keys.size()}));
        if (!leases_.back().empty() && random_() % 5 == 0) {
            pool_->doom({&leases_.back().back(), 1});
        }
        if (leases_.size() > 5) {
            pool_->release(leases_.front());
            leases_.erase(leases_.begin());
        }
        if (random_() % 500 == 0) {
            pool_->clear();
        }
    }

    std::unique_ptr<Pool> pool_;
    std::mt19937_64 random_;
    std::vector<std::vector<uint32_t>> leases_;
};

// With `early` the moment may fall before its work or into its start; without, into its work,
// however slowly the machine starts it.
void live_and_die(int fd, uint64_t seed, bool early, long delay_ns) {
    int working[2];
    CHECK(pipe(working) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        Owner(fd, seed).work(working[1]);
    }
    char byte = 0;
    CHECK(early || read(working[0], &byte, 1) == 1);
    const timespec delay = {0, delay_ns};
    nanosleep(&delay, nullptr);  // the moment of the kill is what is drawn: no wait for anything
    CHECK(kill(child, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    CHECK(close(working[0]) == 0 && close(working[1]) == 0);
}

}  // namespace

int main() {
    std::mt19937_64 random(2026);
    uint64_t kept = 0;
    uint64_t interrupted = 0;
    for (uint64_t round = 0; round < 4; ++round) {
        PoolFixture pool(24, 16384, 120);
        for (uint64_t life = 0; life < 60; ++life) {
            const long delay_ns = static_cast<long>(random() % 8'000'000);
            live_and_die(pool.fd(), 100 * round + life, life % 2 == 0, delay_ns);
            pool.restart();
            kept += pool->recovered().kept;
            interrupted += pool->recovered().freed;
            verify_bytes(*pool.operator->());
        }
    }
    CHECK(kept > 0 && interrupted > 0);
    return 0;
}
