#include "pipeline/nvme_tier.h"

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <map>
#include <mutex>
#include <random>
#include <utility>

#include "base/bytes.h"
#include "base/error.h"
#include "catch.h"
#include "nvme/aligned_buffer.h"
#include "nvme/fault_backend.h"
#include "temporary_directory.h"
#include "trials.h"

namespace strata::pipeline {
namespace {

using nvme::AlignedBuffer;
using nvme::Priority;
using nvme::Traffic;

struct PlanSpec {
  cpu_adam::MomentFormat moments = cpu_adam::MomentFormat::kF32;
  size_t chunk_bytes = 8192;
  bool two_slots = true;
  std::vector<int64_t> units{2 * cpu_adam::kChunkElements + 1000, 8, 5000};
  int activations = 2;
};

/// A plan with nothing but records: parts of one chunk of the optimizer.
Plan make_plan(const PlanSpec& spec) {
  Plan plan;
  plan.placement.moments = spec.moments;
  plan.placement.part_elements = cpu_adam::kChunkElements;
  plan.store_chunk_bytes = spec.chunk_bytes;
  for (const int64_t count : spec.units) {
    const int parts =
        static_cast<int>((count + cpu_adam::kChunkElements - 1) / cpu_adam::kChunkElements);
    plan.parts.push_back({count, cpu_adam::kChunkElements, parts});
  }
  for (size_t unit = 0; unit < spec.units.size(); ++unit) {
    auto& home = plan.buffers.home.emplace_back();
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      const bool is_gradient = static_cast<StateKind>(kind) == StateKind::kGradient;
      home[kind] = static_cast<BufferId>(plan.buffers.all.size());
      plan.buffers.all.push_back({.name = "state",
                                  .tier = Tier::kNvme,
                                  .parts = plan.parts[unit].parts,
                                  .two_slots = spec.two_slots && !is_gradient});
    }
  }
  for (int i = 0; i < spec.activations; ++i) {
    for (const Purpose purpose : {Purpose::kBoundaries, Purpose::kSavedActivations}) {
      plan.buffers.all.push_back({.name = "activation",
                                  .tier = Tier::kNvme,
                                  .purpose = purpose,
                                  .size_bytes = 20000 + 512 * static_cast<size_t>(i)});
    }
  }
  return plan;
}

std::vector<nvme::StoreDirectory> directories_in(const TemporaryDirectory& place, size_t drives) {
  std::vector<nvme::StoreDirectory> directories;
  for (size_t d = 0; d < drives; ++d) {
    directories.push_back({.directory = place.path("drive" + std::to_string(d))});
  }
  return directories;
}

/// What a cache of the tier is lent.
class Memory {
 public:
  explicit Memory(const Plan& plan) {
    for (size_t kind = 0; kind < kStateKinds; ++kind) {
      size_t largest = 0;
      for (size_t unit = 0; unit < plan.parts.size(); ++unit) {
        largest = std::max(
            largest, plan.part_bytes(static_cast<int>(unit), static_cast<StateKind>(kind), 0));
      }
      buffers_[kind] = AlignedBuffer(align_up(largest, kDriveAlignment), kDriveAlignment);
    }
  }
  [[nodiscard]] StateCache cache() const {
    StateCache cache;
    for (size_t kind = 0; kind < kStateKinds; ++kind) cache[kind] = buffers_[kind].bytes();
    return cache;
  }
  /// As whoever lends the memory may do when it is not in use.
  void spoil() {
    for (AlignedBuffer& buffer : buffers_) std::memset(buffer.data(), 0x5a, buffer.size());
  }

 private:
  std::array<AlignedBuffer, kStateKinds> buffers_;
};

/// Gathers what sinks are told.
class Sinks {
 public:
  [[nodiscard]] nvme::StoreSink sink() noexcept {
    return {[](void* context, const nvme::StoreResult& result) noexcept {
              auto& sinks = *static_cast<Sinks*>(context);
              const std::lock_guard lock(sinks.mutex_);
              sinks.results_.emplace_back(result.tag, result.error);
              sinks.changed_.notify_all();
            },
            this};
  }
  /// Tags and errors, in the order of the tags, of the `count` requests since the last call.
  [[nodiscard]] std::vector<std::pair<uint64_t, std::string>> wait_for(size_t count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return results_.size() >= count; });
    auto results = std::exchange(results_, {});
    std::sort(results.begin(), results.end());
    return results;
  }
  [[nodiscard]] size_t count() const {
    const std::lock_guard lock(mutex_);
    return results_.size();
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::pair<uint64_t, std::string>> results_;
};

std::vector<std::byte> random_bytes(std::mt19937_64& random, size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

size_t state_size(const Plan& plan, int unit, StateKind kind) {
  const int last = plan.parts[static_cast<size_t>(unit)].parts - 1;
  return plan.part_offset_bytes(unit, kind, last) + plan.part_bytes(unit, kind, last);
}

StateKind kind_at(size_t index) { return static_cast<StateKind>(index); }

std::span<const std::byte> as_metadata(const uint64_t& value) {
  return std::as_bytes(std::span(&value, 1));
}

const std::vector<PlanSpec> kSpecs{
    {},
    {.moments = cpu_adam::MomentFormat::kBf16, .chunk_bytes = 4096},
    {.moments = cpu_adam::MomentFormat::kInt8},                          // parts end within chunks
    {.moments = cpu_adam::MomentFormat::kInt8, .chunk_bytes = 4096},     // of one block
    {.moments = cpu_adam::MomentFormat::kInt8, .chunk_bytes = 1 << 16},  // larger than parts
};

}  // namespace

TEST_CASE("nvme tier: whole parts come back, and nothing beyond their room is touched") {
  std::mt19937_64 random(3);
  for (const PlanSpec& spec : kSpecs) {
    for (const size_t drives : {size_t{1}, size_t{3}}) {
      INFO("chunks of " << spec.chunk_bytes << ", moments " << cpu_adam::name_of(spec.moments)
                        << ", drives " << drives);
      const TemporaryDirectory place;
      const Plan plan = make_plan(spec);
      NvmeTier tier(plan, {.directories = directories_in(place, drives)}, {});
      struct Piece {
        BufferId buffer;
        size_t offset_bytes, size_bytes, at;
        Traffic kind;
      };
      std::vector<Piece> pieces;
      size_t end = 0;
      const auto add = [&](BufferId buffer, size_t offset, size_t size, Traffic kind) {
        pieces.push_back({buffer, offset, size, end, kind});
        end += align_up(size, kDriveAlignment);
      };
      for (int unit = 0; unit < static_cast<int>(plan.parts.size()); ++unit) {
        for (size_t kind = 0; kind < kStateKinds; ++kind) {
          for (int part = 0; part < plan.parts[static_cast<size_t>(unit)].parts; ++part) {
            const size_t stride = part == 0 ? 0 : plan.record_stride_bytes(unit, kind_at(kind));
            add(plan.home(unit, kind_at(kind)), static_cast<size_t>(part) * stride,
                plan.part_bytes(unit, kind_at(kind), part), traffic_of(kind_at(kind)));
          }
        }
      }
      for (size_t i = 0; i < plan.buffers.all.size(); ++i) {
        const Buffer& buffer = plan.buffers.all[i];
        if (buffer.size_bytes == 0) continue;
        add(static_cast<BufferId>(i), 0, buffer.size_bytes,
            buffer.purpose == Purpose::kBoundaries ? Traffic::kBoundary : Traffic::kOther);
      }
      const AlignedBuffer data(end, kDriveAlignment);
      const AlignedBuffer back(end, kDriveAlignment);
      const auto bytes = random_bytes(random, end);
      std::copy(bytes.begin(), bytes.end(), data.data());
      const auto before = tier.traffic();
      Sinks sinks;
      for (size_t i = 0; i < pieces.size(); ++i) {
        tier.write_async(pieces[i].buffer, pieces[i].offset_bytes, data.data() + pieces[i].at,
                         pieces[i].size_bytes, Priority::kWriteBack, i, sinks.sink());
      }
      for (const auto& [tag, error] : sinks.wait_for(pieces.size())) REQUIRE(error.empty());
      CHECK(std::equal(bytes.begin(), bytes.end(), data.data()));
      // One after the other, from the last: what a read does beyond its room would be seen.
      for (size_t i = pieces.size(); i-- > 0;) {
        tier.read_async(pieces[i].buffer, pieces[i].offset_bytes, back.data() + pieces[i].at,
                        pieces[i].size_bytes, Priority::kStateRead, 1000 + i, sinks.sink());
        const auto results = sinks.wait_for(1);
        REQUIRE(results.size() == 1);
        REQUIRE(results.front().first == 1000 + i);
        REQUIRE(results.front().second.empty());
      }
      std::map<Traffic, size_t> least;
      for (const Piece& piece : pieces) {
        REQUIRE(std::memcmp(back.data() + piece.at, data.data() + piece.at, piece.size_bytes) == 0);
        least[piece.kind] += piece.size_bytes;
      }
      const auto after = tier.traffic();
      for (const auto& [kind, size] : least) {
        const auto index = static_cast<size_t>(kind);
        CHECK(after[index].written - before[index].written >= size);
        CHECK(after[index].read - before[index].read >= size);
        // Padding to chunks, and no more.
        CHECK(after[index].written - before[index].written <=
              size + pieces.size() * spec.chunk_bytes);
      }
      CHECK(tier.has_shadows());
      CHECK(sinks.count() == 0);
      CHECK(tier.bytes_written_total() >= tier.bytes_written());
    }
  }
}

TEST_CASE("nvme tier: any ranges, commits, discards and reopening, against a copy in memory") {
  for (const PlanSpec& spec : kSpecs) {
    for (const size_t drives : {size_t{1}, size_t{3}}) {
      INFO("chunks of " << spec.chunk_bytes << ", moments " << cpu_adam::name_of(spec.moments)
                        << ", drives " << drives);
      std::mt19937_64 random(drives);
      const TemporaryDirectory place;
      const Plan plan = make_plan(spec);
      NvmeOptions options{.directories = directories_in(place, drives)};
      auto tier = std::make_unique<NvmeTier>(plan, options, std::span<std::byte>{});
      options.open_existing = true;
      Memory memory(plan);
      tier->set_cache(memory.cache());
      using States = std::map<std::pair<int, size_t>, std::vector<std::byte>>;
      States now;
      for (int unit = 0; unit < static_cast<int>(plan.parts.size()); ++unit) {
        for (size_t kind = 0; kind < kStateKinds; ++kind) {
          now[{unit, kind}].resize(state_size(plan, unit, kind_at(kind)));
        }
      }
      const auto is_gradient = [](const auto& state) {
        return kind_at(state.first.second) == StateKind::kGradient;
      };
      const auto roll_back = [&](const States& to, bool with_gradients) {
        for (auto& state : now) {
          if (is_gradient(state) && with_gradients) {
            std::fill(state.second.begin(), state.second.end(), std::byte{0});
          } else if (!is_gradient(state)) {
            state.second = to.at(state.first);
          }
        }
      };
      States committed = now;
      uint64_t commits = 0;
      bool is_dirty = false;
      for (int i = 0; i < trials(200, 100); ++i) {
        auto& [key, bytes] = *std::next(now.begin(), static_cast<ptrdiff_t>(random() % now.size()));
        const size_t offset = random() % bytes.size();
        const size_t size = std::min(bytes.size() - offset, 1 + random() % 100000);
        switch (const uint64_t what = random() % 20) {
          case 0:  // commit
          case 1:  // the tier is opened again
          case 2: {
            tier->flush();
            memory.spoil();
            CHECK(tier->has_shadows() == is_dirty);
            if (what != 2) {
              tier->commit(as_metadata(++commits));
              if (is_dirty) {
                committed = now;
              } else {
                --commits;
              }
              CHECK_FALSE(tier->has_shadows());
              uint64_t metadata = 0;
              if (commits > 0) {
                REQUIRE(tier->metadata().size() == sizeof metadata);
                std::memcpy(&metadata, tier->metadata().data(), sizeof metadata);
              }
              CHECK(metadata == commits);
              is_dirty = false;
            }
            if (what == 0) break;
            const uint64_t generation = tier->generation();
            if (random() % 2 == 0) tier->close();
            tier.reset();
            tier = std::make_unique<NvmeTier>(plan, options, std::span<std::byte>{});
            tier->set_cache(memory.cache());
            CHECK(tier->generation() == generation);
            roll_back(committed, true);
            is_dirty = false;
            break;
          }
          case 3:
            tier->flush();
            memory.spoil();
            break;
          case 4:
            if (random() % 2 == 0) tier->flush();
            // Gradients in the cache would be lost as well.
            tier->write_state(0, StateKind::kGradient, 0, now.at({0, 4}));
            tier->flush();
            tier->discard_shadows();
            memory.spoil();
            roll_back(committed, false);
            is_dirty = false;
            CHECK_FALSE(tier->has_shadows());
            break;
          case 5: {  // a task writes a part
            tier->flush();
            const auto unit = static_cast<size_t>(key.first);
            const int part =
                static_cast<int>(random() % static_cast<uint64_t>(plan.parts[unit].parts));
            const StateKind kind = kind_at(key.second);
            const size_t part_size = plan.part_bytes(key.first, kind, part);
            const AlignedBuffer data(align_up(part_size, kDriveAlignment), kDriveAlignment);
            const auto fresh = random_bytes(random, part_size);
            std::copy(fresh.begin(), fresh.end(), data.data());
            std::copy(fresh.begin(), fresh.end(),
                      bytes.begin() +
                          static_cast<ptrdiff_t>(plan.part_offset_bytes(key.first, kind, part)));
            // In the cache until then.
            std::byte first{};
            tier->read_state(key.first, kind, plan.part_offset_bytes(key.first, kind, part),
                             {&first, 1});
            Sinks sinks;
            const size_t stride = part == 0 ? 0 : plan.record_stride_bytes(key.first, kind);
            tier->write_async(plan.home(key.first, kind), static_cast<size_t>(part) * stride,
                              data.data(), part_size, Priority::kWriteBack, 0, sinks.sink());
            REQUIRE(sinks.wait_for(1).front().second.empty());
            if (kind != StateKind::kGradient) is_dirty = true;
            break;
          }
          default:
            if (what % 2 == 0) {
              const auto fresh = random_bytes(random, size);
              std::copy(fresh.begin(), fresh.end(), bytes.begin() + static_cast<ptrdiff_t>(offset));
              tier->write_state(key.first, kind_at(key.second), offset, fresh);
              if (kind_at(key.second) != StateKind::kGradient) is_dirty = true;
            } else {
              std::vector<std::byte> out(size);
              tier->read_state(key.first, kind_at(key.second), offset, out);
              REQUIRE(std::memcmp(out.data(), bytes.data() + offset, size) == 0);
            }
        }
      }
      for (const auto& [key, bytes] : now) {
        std::vector<std::byte> out(bytes.size());
        tier->read_state(key.first, kind_at(key.second), 0, out);
        REQUIRE(out == bytes);
      }
      CHECK(commits > 1);
    }
  }
}

TEST_CASE("nvme tier: tasks read what is committed while they write what is not") {
  std::mt19937_64 random(9);
  const TemporaryDirectory place;
  const Plan plan = make_plan({.moments = cpu_adam::MomentFormat::kInt8});
  NvmeTier tier(plan, {.directories = directories_in(place, 2)}, {});
  const BufferId buffer = plan.home(0, StateKind::kMoment1);
  const size_t size = plan.part_bytes(0, StateKind::kMoment1, 1);
  const size_t offset = plan.record_stride_bytes(0, StateKind::kMoment1);
  const AlignedBuffer memory(align_up(size, kDriveAlignment), kDriveAlignment);
  Sinks sinks;
  const auto write = [&](std::byte value) {
    std::memset(memory.data(), std::to_integer<int>(value), size);
    tier.write_async(buffer, offset, memory.data(), size, Priority::kWriteBack, 1, sinks.sink());
    REQUIRE(sinks.wait_for(1).front().second.empty());
  };
  const auto has = [&](std::byte value) {
    std::memset(memory.data(), 0xcc, memory.size());
    tier.read_async(buffer, offset, memory.data(), size, Priority::kStateRead, 2, sinks.sink());
    REQUIRE(sinks.wait_for(1).front().second.empty());
    return std::all_of(memory.data(), memory.data() + size,
                       [&](std::byte byte) { return byte == value; });
  };
  // Never written: nothing to read, and no sink is called.
  CHECK_THROWS_AS(
      tier.read_async(buffer, offset, memory.data(), size, Priority::kStateRead, 3, sinks.sink()),
      Error);
  CHECK(sinks.count() == 0);
  write(std::byte{1});
  CHECK(has(std::byte{1}));  // nothing is committed
  tier.commit(as_metadata(1));
  CHECK(has(std::byte{1}));
  write(std::byte{2});
  CHECK(has(std::byte{1}));
  tier.discard_shadows();
  CHECK(has(std::byte{1}));
  write(std::byte{3});
  tier.commit(as_metadata(2));
  CHECK(has(std::byte{3}));
  CHECK(tier.store().generation() == tier.generation());
}

TEST_CASE("nvme tier: the store of another plan is refused with what differs") {
  const TemporaryDirectory place;
  const PlanSpec spec;
  NvmeOptions options{.directories = directories_in(place, 1)};
  NvmeTier(make_plan(spec), options, {}).close();
  options.open_existing = true;
  const auto message = [&](const PlanSpec& other) {
    return message_of([&] { const NvmeTier tier(make_plan(other), options, {}); });
  };
  CHECK(message(spec).empty());
  const auto with = [&](auto&& change) {
    PlanSpec other = spec;
    change(other);
    return message(other);
  };
  const std::string begin =
      "the store in '" + place.path("drive0") + "' was made for another plan: ";
  CHECK_THAT(with([](PlanSpec& other) { other.units[2] += 8; }),
             Catch::Contains(begin + "its weight of unit 2 has 10000 bytes instead of 10016;"));
  CHECK_THAT(with([](PlanSpec& other) { other.units.push_back(8); }),
             Catch::Contains("it does not have the weight of unit 3;"));
  CHECK_THAT(with([](PlanSpec& other) { other.units.pop_back(); }),
             Catch::Contains("it has the weight of unit 2 too;"));
  CHECK_THAT(with([](PlanSpec& other) { other.chunk_bytes = 4096; }),
             Catch::Contains("its chunks have 8192 bytes instead of 4096;"));
  CHECK_THAT(with([](PlanSpec& other) { other.two_slots = false; }),
             Catch::Contains("its weight of unit 0 is kept as 'two' instead of 'scratch';"));
  CHECK_THAT(with([](PlanSpec& other) { other.moments = cpu_adam::MomentFormat::kBf16; }),
             Catch::Contains("its moment1 of unit 0 has"));
  // What no commit covers has room elsewhere.
  CHECK(with([](PlanSpec& other) { other.activations = 3; }).empty());
  // Space that is not needed does no harm.
  CHECK(with([](PlanSpec& other) { other.activations = 1; }).empty());
  options.open_existing = false;
  CHECK_THAT(message(spec), Catch::Contains("there is a store in"));
}

TEST_CASE("nvme tier: a plan that is not durable has nothing to commit") {
  const TemporaryDirectory place;
  const Plan plan = make_plan({.two_slots = false});
  NvmeTier tier(plan, {.directories = directories_in(place, 1)}, {});
  const Memory memory(plan);
  tier.set_cache(memory.cache());
  std::mt19937_64 random(2);
  const auto data = random_bytes(random, state_size(plan, 0, StateKind::kWeight));
  tier.write_state(0, StateKind::kWeight, 0, data);
  tier.flush();
  CHECK_FALSE(tier.has_shadows());
  tier.commit(as_metadata(1));
  CHECK(tier.generation() == 0);
  std::vector<std::byte> back(data.size());
  tier.read_state(0, StateKind::kWeight, 0, back);
  CHECK(back == data);
}

TEST_CASE("nvme tier: errors of the drive come through the sinks, with the store's words") {
  std::mt19937_64 random(5);
  const TemporaryDirectory place;
  // 32896 bytes are four chunks and a part of one.
  const Plan plan = make_plan({.moments = cpu_adam::MomentFormat::kInt8});
  nvme::FaultDisk disk(8 * kMiB);
  NvmeTier tier(plan, {.directories = directories_in(place, 1), .backend = disk.factory()}, {});
  const BufferId buffer = plan.home(0, StateKind::kMoment2);
  const size_t size = plan.part_bytes(0, StateKind::kMoment2, 0);
  REQUIRE(size == 4 * 8192 + 128);
  const size_t stride = plan.record_stride_bytes(0, StateKind::kMoment2);
  const AlignedBuffer memory(align_up(size, kDriveAlignment), kDriveAlignment);
  Sinks sinks;
  for (uint64_t part = 0; part < 2; ++part) {
    tier.write_async(buffer, part * stride, memory.data(), size, Priority::kWriteBack, part,
                     sinks.sink());
  }
  for (const auto& [tag, error] : sinks.wait_for(2)) CHECK(error.empty());

  SECTION("a read: each of the five chunks") {
    for (uint64_t i = 0; i < 5; ++i) {
      disk.fail(nvme::Operation::kRead, disk.count(nvme::Operation::kRead) + i, 1, EIO);
      tier.read_async(buffer, 0, memory.data(), size, Priority::kStateRead, 7, sinks.sink());
      const auto results = sinks.wait_for(1);
      REQUIRE(results.size() == 1);
      CHECK(results[0].first == 7);
      CHECK_THAT(results[0].second, Catch::Contains("cannot read '") &&
                                        Catch::Contains("of the moment2 of unit 0") &&
                                        Catch::Contains("Input/output error"));
    }
    CHECK(tier.first_error().has_value());
  }
  SECTION("a write: from then on nothing is taken, and nothing committed") {
    disk.fail(nvme::Operation::kWrite, disk.count(nvme::Operation::kWrite) + 2, 1, ENOSPC);
    tier.write_async(buffer, 0, memory.data(), size, Priority::kWriteBack, 8, sinks.sink());
    const auto results = sinks.wait_for(1);
    CHECK_THAT(results[0].second,
               Catch::Contains("cannot write '") && Catch::Contains("No space left on device"));
    CHECK_THAT(message_of([&] {
                 tier.write_async(buffer, 0, memory.data(), size, Priority::kWriteBack, 9,
                                  sinks.sink());
               }),
               Catch::Contains("the store takes nothing more after an error"));
    CHECK_THROWS_AS(tier.commit(as_metadata(1)), Error);
    CHECK(sinks.count() == 0);
    CHECK(tier.generation() == 0);
  }
  SECTION("more at once than there are chunks for their ends") {
    constexpr size_t kRequests = 60;
    const AlignedBuffer many(kRequests * memory.size(), kDriveAlignment);
    for (uint64_t i = 0; i < kRequests; ++i) {
      tier.read_async(buffer, i % 2 * stride, many.data() + i * memory.size(), size,
                      Priority::kStateRead, i, sinks.sink());
    }
    for (const auto& [tag, error] : sinks.wait_for(kRequests)) CHECK(error.empty());
  }
}

}  // namespace strata::pipeline
