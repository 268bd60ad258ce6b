// What a run takes of each tier against what its plan said. Of the whole process: tests/cli.
#include <numeric>
#include <string>

#include "catch.h"
#include "nvme/arena_file.h"
#include "nvme/store.h"
#include "pipeline/executor.h"
#include "train/run_plan.h"
#include "train/trainer_fixture.h"

namespace strata::train {
namespace {

using pipeline::Tier;

struct Case {
  std::string name;
  OffloadChoice offload = OffloadChoice::kNone;
  CommitChoice commit = CommitChoice::kStep;
  int drives = 0;
  cpu_adam::MomentFormat moments = cpu_adam::MomentFormat::kF32;
};

/// Bytes of the records' slots on one drive: its file without superblocks, maps and tables, which
/// lie before them.
int64_t data_bytes(const nvme::StoreMap& map, size_t drive) {
  const nvme::DriveMap& of = map.drives[drive];
  const auto encoded = nvme::encode(map);
  const int64_t second_map = nvme::map_offsets(encoded.size(), map.alignment_bytes)[1];
  const auto map_bytes =
      static_cast<int64_t>(align_up(encoded.size(), static_cast<size_t>(map.alignment_bytes)));
  CHECK(of.tables_offset_bytes == second_map + map_bytes);
  return of.file_size_bytes - of.tables_offset_bytes - of.tables_size_bytes;
}

}  // namespace

TEST_CASE("arenas and stores have the planned size, exactly") {
  const Bench bench;
  const auto test = GENERATE(
      Case{"none", OffloadChoice::kNone}, Case{"host", OffloadChoice::kHost},
      Case{"step", OffloadChoice::kNvme, CommitChoice::kStep, 1},
      Case{"save", OffloadChoice::kNvme, CommitChoice::kSave, 1, cpu_adam::MomentFormat::kInt8},
      Case{"three", OffloadChoice::kNvme, CommitChoice::kStep, 3});
  CAPTURE(test.name);
  TrainConfig config = bench.config("run");
  config.offload = test.offload;
  config.commit = test.commit;
  config.optimizer_state = test.moments;
  config.device = DeviceChoice::kHost;
  config.device_memory = size_t{64} << 20;
  for (int d = 0; d < test.drives; ++d) {
    config.nvme.push_back({bench.output("drive" + std::to_string(d)).string(), std::nullopt});
  }
  const auto device = open_device(config).device;
  const model::Llama llama(model::read_llama_config(config.model), config.compute_dtype,
                           config.sequence_len);
  pipeline::Plan plan = plan_run(config, *device, llama, profile_of(config, *device),
                                 {.data_bytes = 1000, .memory = memory_of(*device)})
                            .plan;
  const std::array<size_t, pipeline::kTiers.size()> planned = plan.tier_bytes;
  const size_t free_before = device->free_memory_bytes();
  const pipeline::Executor executor(*device, llama, std::move(plan),
                                    {.cpu_threads = 2, .nvme = nvme_options(config)});
  CHECK(free_before - device->free_memory_bytes() == planned[static_cast<size_t>(Tier::kDevice)]);

  const size_t on_nvme = planned[static_cast<size_t>(Tier::kNvme)];
  REQUIRE((executor.nvme() != nullptr) == (test.drives > 0));
  REQUIRE((on_nvme > 0) == (test.drives > 0));
  if (executor.nvme() == nullptr) return;
  const nvme::StoreMap& map = executor.nvme()->store().map();
  REQUIRE(map.drives.size() == static_cast<size_t>(test.drives));
  int64_t data = 0;
  for (size_t d = 0; d < map.drives.size(); ++d) {
    data += data_bytes(map, d);
    CHECK(fs::file_size(nvme::arena_path(config.nvme[d].path)) ==
          static_cast<uint64_t>(map.drives[d].file_size_bytes));
  }
  CHECK(data == static_cast<int64_t>(on_nvme));
}

TEST_CASE("a plan is told before anything of it is made") {
  const Bench bench;
  TrainConfig config = bench.config("run");
  config.max_steps = 1;
  config.device = DeviceChoice::kHost;
  config.device_memory = size_t{64} << 20;
  Recorder recorder;
  run(config, recorder);
  const size_t on_device = recorder.tier_bytes[static_cast<size_t>(Tier::kDevice)];
  CHECK(on_device > 0);
  CHECK(recorder.free_when_planned == *config.device_memory);
  CHECK(recorder.free_when_planned - recorder.free_when_begun == on_device);
}

TEST_CASE("device_memory is of each rank, though ranks share what is there") {
  const Bench bench;
  TrainConfig config = bench.config("run");
  config.offload = OffloadChoice::kNone;
  config.device = DeviceChoice::kHost;
  const model::Llama llama(model::read_llama_config(config.model), config.compute_dtype,
                           config.sequence_len);
  const auto plan = [&](int local_ranks) {
    const auto device = open_device(config).device;
    return plan_run(config, *device, llama, profile_of(config, *device),
                    {.memory = memory_of(*device, local_ranks), .local_ranks = local_ranks})
        .plan;
  };
  config.device_memory = size_t{1} << 30;
  const size_t needed = plan(1).bytes(Tier::kDevice);
  config.device_memory = needed;
  CHECK(plan(1).bytes(Tier::kDevice) == needed);
  CHECK(plan(2).bytes(Tier::kDevice) == needed);
}

}  // namespace strata::train
