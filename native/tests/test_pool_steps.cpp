// kill -9 after every single instruction: an owner is stepped through reserves that take a free
// slot, evict in their own class and take slabs of another, through commits, aborts, dooms and
// releases. Whatever the segment holds then is what a kill would leave: each state is attached
// and verified.
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <vector>

#include "pool_bytes.h"

namespace {

using namespace kvferry_test;

constexpr uint64_t kSlab = 8192;
constexpr uint64_t kSlabs = 3;
constexpr uint64_t kKeys = 10;

// What the owner tells its parent.
struct Told {
    volatile uint64_t evictions = 0;
    volatile bool passes = false;  // only payload bytes until it stops itself
    volatile bool over = false;
};

class Owner {
  public:
    Owner(int fd, Told& told) : pool_(Pool::attach(fd, 1)), told_(told) {}

    void save(const std::vector<uint64_t>& numbers, bool commit = true) {
        std::vector<Key> keys;
        for (const uint64_t n : numbers) {
            keys.push_back(key_of(n));
        }
        std::vector<int64_t> got(keys.size());
        pool_->reserve({keys.data(), keys.size()}, payload_of(numbers[0]), 1, got.data());
        std::vector<uint32_t> taken;
        for (size_t i = 0; i < got.size(); ++i) {
            CHECK(got[i] >= 0);
            taken.push_back(static_cast<uint32_t>(got[i]));
            told_.passes = true;
            const uint32_t crc = fill_bytes(*pool_, numbers[i], taken.back());
            told_.passes = false;
            raise(SIGSTOP);
            pool_->set_crcs({&taken.back(), 1}, 0, &crc);
        }
        commit ? pool_->commit(taken) : pool_->abort(taken);
    }

    void doom(uint64_t number) {
        const Key key = key_of(number);
        const std::vector<uint32_t> leased = pool_->lease({&key, 1});
        CHECK(leased.size() == 1);
        pool_->doom(leased);
        pool_->release(leased);
    }

    void use(uint64_t number) {
        const Key key = key_of(number);
        pool_->release(pool_->lease({&key, 1}));
    }

    uint64_t evictions() const { return pool_->stats().evictions; }
    void clear() { pool_->clear(); }

  private:
    std::unique_ptr<Pool> pool_;
    Told& told_;
};

[[noreturn]] void live(int fd, Told& told) {
    Owner owner(fd, told);
    CHECK(ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) == 0);
    raise(SIGSTOP);  // from here on every instruction is one of the parent's steps
    owner.save({0, 3, 6});
    owner.save({1, 4});
    owner.save({9}, false);
    owner.save({7, 10});  // all three slabs are taken
    owner.use(3);
    owner.save({13, 16});  // evicts the coldest of its class, twice
    owner.save({2});       // takes a slab of another class, with all that is in it
    owner.doom(2);
    owner.save({12, 15, 18});
    owner.save({21, 24, 27});  // for want of entries
    owner.clear();
    told.evictions = owner.evictions();
    told.over = true;
    for (;;) {
        pause();
    }
}

class Watch {
  public:
    Watch(PoolFixture& pool, pid_t owner)
        : pool_(pool), owner_(owner), copy_(kSlabs, kSlab, kKeys) {
        CHECK(copy_.bytes() == pool.bytes());
        seen_ = view_of(pool.fd(), PROT_READ);
        to_ = view_of(copy_.fd(), PROT_READ | PROT_WRITE);
    }
    ~Watch() {
        munmap(seen_, pool_.bytes());
        munmap(to_, pool_.bytes());
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // One instruction further, or over all the bytes of a payload; what has changed is verified.
    void step(bool passes) {
        CHECK(ptrace(passes ? PTRACE_CONT : PTRACE_SINGLESTEP, owner_, nullptr, nullptr) == 0);
        int status = 0;
        CHECK(waitpid(owner_, &status, 0) == owner_ && WIFSTOPPED(status));
        if (std::memcmp(seen_, last_.data(), last_.size()) != 0) {
            crash();
        }
    }

    uint64_t states() const { return states_; }
    uint64_t most() const { return most_; }

  private:
    std::byte* view_of(int fd, int access) const {
        void* at = mmap(nullptr, pool_.bytes(), access, MAP_SHARED, fd, 0);
        CHECK(at != MAP_FAILED);
        return static_cast<std::byte*>(at);
    }

    void crash() {
        last_.assign(seen_, seen_ + pool_.bytes());
        std::memcpy(to_, last_.data(), last_.size());
        const uint64_t ready = verify_bytes(*Pool::attach(copy_.fd(), 2));
        CHECK(ready <= ready_ + 1 && ready_ <= ready + 1);  // one comes or goes, never several
        ready_ = ready;
        most_ = std::max(most_, ready);
        ++states_;
    }

    PoolFixture& pool_;
    pid_t owner_;
    PoolFixture copy_;
    std::byte* seen_;
    std::byte* to_;
    std::vector<std::byte> last_ = std::vector<std::byte>(pool_.bytes());
    uint64_t ready_ = 0;
    uint64_t most_ = 0;
    uint64_t states_ = 0;
};

}  // namespace

int main() {
    PoolFixture pool(kSlabs, kSlab, kKeys);
    void* shared =
        mmap(nullptr, sizeof(Told), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED);
    auto& told = *new (shared) Told;
    const pid_t owner = fork();
    CHECK(owner >= 0);
    if (owner == 0) {
        live(pool.fd(), told);
    }
    int status = 0;
    CHECK(waitpid(owner, &status, 0) == owner && WIFSTOPPED(status));
    uint64_t steps = 0;
    Watch watch(pool, owner);
    while (!told.over) {
        watch.step(told.passes);
        ++steps;
    }
    CHECK(kill(owner, SIGKILL) == 0 && waitpid(owner, &status, 0) == owner);
    std::printf("%lu steps, %lu states, at most %lu ready, %lu evictions\n", steps, watch.states(),
                watch.most(), uint64_t{told.evictions});
    CHECK(told.evictions >= 5 && watch.most() >= 8);
    munmap(shared, sizeof(Told));
    return 0;
}
