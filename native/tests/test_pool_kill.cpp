// kill -9 at any instruction, some hundred times: a forked owner works on the pool without end, the
// parent kills it at a random moment, attaches and verifies every byte that is ready.
#include <signal.h>
#include <sys/wait.h>
#include <time.h>

#include <cstring>
#include <random>
#include <vector>

#include "kvferry/crc32c.h"
#include "pool_fixture.h"

namespace {

using namespace kvferry_test;

constexpr uint64_t kUniverse = 200;
constexpr uint64_t kPayloads[3] = {700, 3000, 7000};

uint64_t payload_of(uint64_t n) {
    return kPayloads[n % 3];
}
uint8_t byte_of(uint64_t n, uint64_t at) {
    return static_cast<uint8_t>(n * 31 + at * 7 + at / 256);
}

class Owner {
  public:
    Owner(int fd, uint64_t seed) : pool_(Pool::attach(fd, seed)), random_(seed) {}

    [[noreturn]] void work() {
        for (;;) {
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
                write(numbers[i], taken.back());
            }
        }
        if (random_() % 10 == 0) {
            pool_->abort(taken);
        } else {
            pool_->commit(taken);
        }
    }

    void write(uint64_t n, uint32_t id) {
        uint64_t offset = 0;
        uint32_t seed = 0;
        pool_->payload_offsets({&id, 1}, &offset);
        pool_->seeds({&id, 1}, &seed);
        auto* to = reinterpret_cast<uint8_t*>(pool_->base() + offset);
        for (uint64_t at = 0; at < payload_of(n); ++at) {
            to[at] = byte_of(n, at);
        }
        const uint32_t crc = kvferry::crc32c(to, payload_of(n), seed);
        pool_->set_crcs({&id, 1}, 0, &crc);
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

void live_and_die(int fd, uint64_t seed, long delay_ns) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        Owner(fd, seed).work();
    }
    const timespec delay = {0, delay_ns};
    nanosleep(&delay, nullptr);  // the moment of the kill is what is drawn: no wait for anything
    CHECK(kill(child, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

void verify(PoolFixture& pool) {
    pool.check();
    CHECK(pool->recovered().dropped == 0);
    uint64_t ready = 0;
    for (uint64_t n = 0; n < kUniverse; ++n) {
        const Key key = key_of(n);
        const std::vector<uint32_t> ids = pool->lease({&key, 1});
        if (ids.empty()) {
            continue;
        }
        ++ready;
        const auto* from = reinterpret_cast<const uint8_t*>(pool.payload(ids[0]));
        for (uint64_t at = 0; at < payload_of(n); ++at) {
            CHECK(from[at] == byte_of(n, at));
        }
        uint32_t seed = 0;
        uint32_t crc = 0;
        bool stored = false;
        pool->seeds(ids, &seed);
        pool->crcs(ids, 0, &crc, &stored);
        CHECK(stored && crc == kvferry::crc32c(from, payload_of(n), seed));
        pool->release(ids);
    }
    CHECK(ready == pool->stats().ready);
    pool.check();
}

}  // namespace

int main() {
    std::mt19937_64 random(2026);
    uint64_t kept = 0;
    uint64_t interrupted = 0;
    for (uint64_t round = 0; round < 4; ++round) {
        PoolFixture pool(24, 16384, 120);
        for (uint64_t life = 0; life < 60; ++life) {
            live_and_die(pool.fd(), 100 * round + life, static_cast<long>(random() % 8'000'000));
            pool.restart();
            kept += pool->recovered().kept;
            interrupted += pool->recovered().freed;
            verify(pool);
        }
    }
    CHECK(kept > 0 && interrupted > 0);
    return 0;
}
