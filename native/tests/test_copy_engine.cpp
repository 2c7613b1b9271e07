// The copy engine under threads: meant to be run with ASan, UBSan and TSan.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"
#include "kvferry/copy_engine.h"
#include "kvferry/crc32c.h"

namespace {

using kvferry::CopyCompletion;
using kvferry::CopyDirection;
using kvferry::CopyEngine;
using kvferry::CopyRequest;
using kvferry::CopyStatus;
using kvferry::Layout;
using kvferry::Mapping;

constexpr int64_t kBlocks = 65;
constexpr int64_t kRun = 4096;
constexpr int64_t kLayers = 16;
constexpr size_t kPayload = kRun * kLayers;

struct Fixture {
    std::shared_ptr<Mapping> mapping;
    std::shared_ptr<Layout> layout;
    std::vector<std::byte> pool = std::vector<std::byte>(kBlocks * kPayload);

    Fixture() {
        const size_t total = kBlocks * kPayload;
        const int fd = memfd_create("kv", MFD_ALLOW_SEALING);
        CHECK(fd >= 0);
        CHECK(ftruncate(fd, static_cast<off_t>(total)) == 0);
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
        mapping = std::make_shared<Mapping>(fd, total);
        close(fd);
        std::mt19937_64 random(1);
        for (size_t at = 0; at < total; at += 8) {
            const uint64_t word = random();
            std::memcpy(mapping->data() + at, &word, 8);
        }
        std::vector<int64_t> offsets(kLayers);
        for (int64_t layer = 0; layer < kLayers; ++layer) {
            offsets[layer] = layer * kBlocks * kRun;
        }
        const std::vector<int64_t> same(kLayers, kRun);
        layout = std::make_shared<Layout>(mapping, offsets, same, same, kBlocks);
    }

    std::vector<std::byte> block(int64_t id) const {
        std::vector<std::byte> bytes;
        for (const auto& run : layout->runs()) {
            const std::byte* from = layout->at(run, id);
            bytes.insert(bytes.end(), from, from + run.length);
        }
        return bytes;
    }

    // Blocks first .. first+count-1 against the same slots of the pool.
    CopyRequest request(uint64_t ticket, CopyDirection direction, int32_t first = 1,
                        int32_t count = kBlocks - 1) {
        CopyRequest made;
        made.ticket = ticket;
        made.direction = direction;
        made.layout = layout;
        made.pool = pool.data();
        made.pool_bytes = pool.size();
        made.crc = true;
        for (int32_t i = first; i < first + count; ++i) {
            made.blocks.push_back(i);
            made.pool_offsets.push_back(static_cast<uint64_t>(i) * kPayload);
            made.seeds.push_back(static_cast<uint32_t>(i) * 77);
        }
        return made;
    }
};

std::map<uint64_t, CopyCompletion> drain(CopyEngine& engine, size_t count) {
    std::map<uint64_t, CopyCompletion> all;
    while (all.size() < count) {
        pollfd ready{engine.event_fd(), POLLIN, 0};
        CHECK(poll(&ready, 1, 60000) == 1);
        for (CopyCompletion& done : engine.poll()) {
            CHECK(all.emplace(done.ticket, std::move(done)).second);
        }
    }
    return all;
}

void test_round_trip() {
    Fixture f;
    CopyEngine engine(4);
    engine.submit(f.request(1, CopyDirection::kGather));
    const CopyCompletion saved = drain(engine, 1).at(1);
    CHECK(saved.status == CopyStatus::kDone);
    CHECK(saved.moved_bytes == (kBlocks - 1) * kPayload);
    for (int64_t i = 1; i < kBlocks; ++i) {
        const auto bytes = f.block(i);
        CHECK(std::memcmp(f.pool.data() + i * kPayload, bytes.data(), kPayload) == 0);
        CHECK(saved.crcs[i - 1] ==
              kvferry::crc32c(bytes.data(), kPayload, static_cast<uint32_t>(i) * 77));
    }
    CopyRequest load = f.request(2, CopyDirection::kScatter);
    load.expected = saved.crcs;
    f.pool[5 * kPayload + 123] ^= std::byte{1};
    f.pool[60 * kPayload] ^= std::byte{1};
    engine.submit(load);
    const CopyCompletion bad = drain(engine, 1).at(2);
    CHECK(bad.status == CopyStatus::kChecksum);
    CHECK(bad.bad_index == 4);
}

// Jobs of one test never share a block or a slot: only the engine could race.
// Submitters that cancel some of their jobs, and a poller, at once: one completion per job.
void test_races() {
    for (int round = 0; round < 20; ++round) {
        Fixture f;
        CopyEngine engine(3);
        std::vector<std::thread> submitters;
        for (int32_t part = 0; part < 2; ++part) {
            submitters.emplace_back([&f, &engine, part] {
                for (int32_t i = 0; i < 16; ++i) {
                    const int32_t first = 1 + part * 32 + i * 2;
                    const auto ticket = static_cast<uint64_t>(first);
                    engine.submit(f.request(ticket, CopyDirection::kGather, first, 2));
                    if (i % 3 == 0) {
                        engine.cancel(ticket);
                    }
                }
            });
        }
        const auto all = drain(engine, 32);
        for (auto& thread : submitters) {
            thread.join();
        }
        CHECK(engine.pending() == 0);
        CHECK(engine.poll().empty());
        for (const auto& [ticket, done] : all) {
            CHECK(done.status == CopyStatus::kDone || done.status == CopyStatus::kCancelled);
            if (done.status == CopyStatus::kDone) {
                const auto bytes = f.block(static_cast<int64_t>(ticket));
                CHECK(std::memcmp(f.pool.data() + ticket * kPayload, bytes.data(), kPayload) == 0);
            }
        }
    }
}

void test_close_while_others_submit() {
    for (int round = 0; round < 20; ++round) {
        Fixture f;
        CopyEngine engine(2);
        std::atomic<uint64_t> accepted{0};
        std::thread submitter([&] {
            try {
                for (int32_t block = 1; block < kBlocks; ++block) {
                    engine.submit(
                        f.request(static_cast<uint64_t>(block), CopyDirection::kScatter, block, 1));
                    ++accepted;
                }
            } catch (const std::invalid_argument&) {
                // Closed before all were in.
            }
        });
        while (accepted < 3) {
            std::this_thread::yield();
        }
        engine.close();
        submitter.join();
        CHECK(drain(engine, accepted).size() == accepted);
        // Nothing may write any more: the memory is the test's again.
        std::memset(f.mapping->data(), 0, f.mapping->total_bytes());
    }
}

void test_destruction_drains() {
    Fixture f;
    auto engine = std::make_unique<CopyEngine>(2);
    for (int32_t block = 1; block < kBlocks; block += 4) {
        engine->submit(f.request(static_cast<uint64_t>(block), CopyDirection::kScatter, block, 4));
    }
    const std::weak_ptr<Layout> layout = f.layout;
    f.layout.reset();
    f.mapping.reset();
    CHECK(!layout.expired());
    engine.reset();
    CHECK(layout.expired());
}

void test_refusals() {
    Fixture f;
    CHECK_THROWS(CopyEngine(0), std::invalid_argument);
    CHECK_THROWS(CopyEngine(CopyEngine::kThreadsMax + 1), std::invalid_argument);
    CopyEngine engine(1);
    CopyRequest null_block = f.request(1, CopyDirection::kScatter);
    null_block.blocks[7] = 0;
    CHECK_THROWS(engine.submit(null_block), std::invalid_argument);
    CopyRequest past = f.request(1, CopyDirection::kScatter);
    past.pool_offsets[7] = past.pool_bytes - kPayload + 1;
    CHECK_THROWS(engine.submit(past), std::invalid_argument);
    CopyRequest wraps = f.request(1, CopyDirection::kScatter);
    wraps.pool_bytes = 0;
    wraps.pool_offsets[7] = UINT64_MAX;
    CHECK_THROWS(engine.submit(wraps), std::invalid_argument);
    CopyRequest unverified = f.request(1, CopyDirection::kGather);
    unverified.expected.resize(unverified.blocks.size());
    CHECK_THROWS(engine.submit(unverified), std::invalid_argument);
    CHECK(engine.pending() == 0);
}

// The memory of a peer is unmapped by a thread, also when that is destroyed or was still mapping.
void test_let_go() {
    const size_t total = size_t{65} << 20;
    for (const bool ahead : {false, true}) {
        const int fd = memfd_create("kv", MFD_ALLOW_SEALING);
        CHECK(fd >= 0);
        CHECK(ftruncate(fd, static_cast<off_t>(total)) == 0);
        CHECK(posix_fallocate(fd, 0, static_cast<off_t>(total)) == 0);
        CHECK(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0);
        Mapping waited(fd, total, ahead);
        Mapping small(fd, 4096, ahead);
        auto destroyed = std::make_unique<Mapping>(fd, total, ahead);
        close(fd);
        std::byte* const data = waited.data();
        CHECK(msync(data, 4096, MS_ASYNC) == 0);
        destroyed->let_go();
        destroyed.reset();
        CHECK(small.let_go());
        while (!waited.let_go()) {
            std::this_thread::yield();
        }
        CHECK(waited.let_go());
        CHECK(msync(data, 4096, MS_ASYNC) != 0 && errno == ENOMEM);
    }
}

}  // namespace

int main() {
    test_round_trip();
    test_races();
    test_close_while_others_submit();
    test_destruction_drains();
    test_refusals();
    test_let_go();
    return 0;
}
