#include "pipeline/executor.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <limits>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "gpu/operators.h"
#include "pipeline/batch_layout.h"

namespace strata::pipeline {
namespace {

constexpr std::array kDeviceLanes{Lane::kUpload, Lane::kCompute, Lane::kDownload,
                                  Lane::kCollective};
constexpr std::array kHostLanes{Lane::kCpu, Lane::kReadWeight, Lane::kReadState, Lane::kWrite};

/// Times that other threads write are looked at while a graph runs; 0: not yet.
void set_ns(int64_t& time, int64_t ns) {
  std::atomic_ref(time).store(ns, std::memory_order_relaxed);
}
bool is_set(const int64_t& time) {
  return std::atomic_ref(const_cast<int64_t&>(time)).load(std::memory_order_relaxed) != 0;
}

int64_t now_ns() {
  return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The constants and the randomness of one optimizer step.
struct UpdateConstants {
  cpu_adam::StepConstants constants{};
  uint64_t seed = 0;
  int64_t step = 0;
};

}  // namespace

class Executor::Impl {
 public:
  Impl(gpu::Device& device, const UnitModel& model, Plan plan, const ExecutorOptions& options)
      : device_(device),
        model_(model),
        plan_(std::move(plan)),
        ranks_(plan_.placement.ranks),
        groups_(options.ranks),
        adam_arena_(options.cpu_threads > 0 ? options.cpu_threads : tbb::task_arena::automatic) {
    STRATA_CHECK(
        ranks_.ranks == 1 || (groups_ != nullptr && groups_->world->size() == ranks_.ranks &&
                              groups_->shard->size() == ranks_.shard_ranks),
        "communicators of the plan's ranks");
    device_arena_ = device_.allocate_device_memory(plan_.bytes(Tier::kDevice));
    host_arena_ = device_.allocate_host_memory(plan_.bytes(Tier::kHost));
    for (const Buffer& buffer : plan_.buffers.all) address_.push_back(address(buffer));
    for (const Lane lane : kDeviceLanes) {
      if (lane == Lane::kCollective && ranks_.ranks == 1) continue;
      streams_[index(lane)] = device_.create_stream(std::string(name_of(lane)));
    }
    size_t most_tasks = 0;
    for (const StepGraph* graph : {&plan_.train, &plan_.update, &plan_.replay, &plan_.evaluate}) {
      most_tasks = std::max(most_tasks, graph->size());
    }
    for (size_t i = 0; i < most_tasks; ++i) events_.push_back(device_.create_event());
    state_.resize(most_tasks);
    requests_ = std::vector<DiskTask>(most_tasks);
    begin_ns_.resize(most_tasks);
    end_ns_.resize(most_tasks);
    timeline_.tasks.resize(plan_.train.size());
    sequences_.resize(static_cast<size_t>(plan_.shape.micro_batches));
    max_sequence_.resize(static_cast<size_t>(plan_.shape.micro_batches));
    for (auto& queue : lane_tasks_) queue.reserve(most_tasks);
    cut_segments();
    open_store(options.nvme);
    write_constants();
    for (const Lane lane : kHostLanes) {
      threads_.emplace_back([this, lane](const std::stop_token& stop) { run_lane(lane, stop); });
      pthread_setname_np(threads_.back().native_handle(), std::string(name_of(lane)).c_str());
    }
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);  // so that no lane can miss it between look and sleep
      for (std::jthread& thread : threads_) thread.request_stop();
    }
    changed_.notify_all();
    threads_.clear();
    // Streams drain as they go, before the arenas that their work points into; so does the store.
    for (auto& stream : streams_) stream.reset();
    nvme_.reset();
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] Activity activity() const {
    const std::lock_guard lock(mutex_);
    Activity activity;
    if (graph_ == nullptr) return activity;
    TaskId at = -1;
    for (size_t t = 0; t < graph_->size(); ++t) {
      if (is_set(end_ns_[t])) {
        ++activity.ended;
        continue;
      }
      if (!is_set(begin_ns_[t])) continue;
      // Of several the first that is not between ranks.
      const bool is_between = (*graph_)[t].lane == Lane::kCollective;
      if (at < 0 || (activity.waits_for_ranks && !is_between)) {
        at = static_cast<TaskId>(t);
        activity.waits_for_ranks = is_between;
      }
    }
    if (at < 0) return activity;
    const Task& task = (*graph_)[static_cast<size_t>(at)];
    activity.task = name_of(task.kind);
    if (task.unit >= 0) {
      activity.task += " of " + model_.units()[static_cast<size_t>(task.unit)].name;
    }
    return activity;
  }

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }
  [[nodiscard]] const Timeline& timeline() const noexcept { return timeline_; }
  [[nodiscard]] const NvmeTier* nvme() const noexcept { return nvme_.get(); }
  [[nodiscard]] std::span<const std::byte> metadata() const {
    return nvme_ ? nvme_->metadata() : std::span<const std::byte>{};
  }

  StepResult train_step(std::span<const HostMicroBatch> micro_batches, float loss_scale,
                        const OptimizerRule& rule) {
    settle();
    stage(micro_batches);
    loss_scale_ = loss_scale;
    speculated_ = constants_of(rule, 1);
    run(plan_.train);
    pending_ = false;
    note_times();
    StepResult result{.loss_sum = loss_sum(), .gradient_norm = std::sqrt(sum_of_squares())};
    result.finite = std::isfinite(result.gradient_norm);
    if (!result.finite) {
      if (nvme_) nvme_->discard_shadows();
      return result;
    }
    const double coefficient =
        rule.max_grad_norm > 0 ? rule.max_grad_norm / (result.gradient_norm + 1e-6) : 1.0;
    result.clipped = coefficient < 1;
    STRATA_CHECK(!result.clipped || plan_.placement.clipping, "a plan that clips");
    const UpdateConstants constants = constants_of(rule, std::min(coefficient, 1.0));
    if (speculates_) {
      if (result.clipped) {
        nvme_->discard_shadows();
        speculated_ = constants;
        run(plan_.replay);
        result.replayed = true;
      }
      accepted_ = true;
    }
    deferred_ = constants;
    pending_ = true;
    return result;
  }

  void finish_update() {
    if (!pending_) return;
    if (!plan_.update.empty()) run(plan_.update);
    pending_ = false;
  }

  void commit(std::span<const std::byte> metadata) {
    if (!nvme_) return;
    finish_update();
    nvme_->flush();
    nvme_->commit(metadata);
    if (!accepted_) return;
    accepted_ = false;
    // The new weights in host memory hold from now on too.
    for (size_t unit = 0; unit < model_.units().size(); ++unit) {
      const BufferId shadow = plan_.buffers.weight_shadow[unit];
      if (shadow == kNoBuffer) continue;
      const BufferId home = plan_.home(static_cast<int>(unit), StateKind::kWeight);
      std::swap(address_[static_cast<size_t>(home)], address_[static_cast<size_t>(shadow)]);
    }
  }

  double evaluate(std::span<const HostMicroBatch> micro_batches) {
    finish_update();
    settle();
    stage(micro_batches);
    run(plan_.evaluate);
    return loss_sum();
  }

  void logits(const HostMicroBatch& micro_batch, int64_t row, std::span<float> out) {
    STRATA_CHECK(plan_.shape.micro_batches == 1 && plan_.buffers.logits != kNoBuffer,
                 "logits are for inference plans of one micro-batch");
    STRATA_CHECK(static_cast<int64_t>(out.size()) == model_.vocabulary(), "one logit a token");
    settle();
    stage({&micro_batch, 1});
    logits_row_ = row;
    run(plan_.evaluate);
    logits_row_ = -1;
    copy_out(pointer(plan_.buffers.logits), Tier::kDevice, std::as_writable_bytes(out));
  }

  void read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out) {
    finish_update();
    settle_acceptance();
    const BufferId id = state_buffer(unit, kind, offset_bytes, out.size());
    if (plan_.buffer(id).tier == Tier::kNvme) {
      nvme_->read_state(unit, kind, offset_bytes, out);
      return;
    }
    copy_out(shard_pointer(id, unit, kind) + offset_bytes, plan_.buffer(id).tier, out);
  }

  void write_state(int unit, StateKind kind, size_t offset_bytes, std::span<const std::byte> data) {
    finish_update();
    settle_acceptance();
    const BufferId id = state_buffer(unit, kind, offset_bytes, data.size());
    if (plan_.buffer(id).tier == Tier::kNvme) {
      nvme_->write_state(unit, kind, offset_bytes, data);
      return;
    }
    copy_in(shard_pointer(id, unit, kind) + offset_bytes, plan_.buffer(id).tier, data);
  }

  [[nodiscard]] size_t state_size_bytes(int unit, StateKind kind) const {
    if (plan_.home(unit, kind) == kNoBuffer) return 0;
    return state_bytes(kind, plan_.parts[static_cast<size_t>(unit)].parameter_count, plan_.dtype,
                       plan_.placement.moments);
  }

  [[nodiscard]] ElementRange shard(int unit) const {
    return shard_range(model_.units()[static_cast<size_t>(unit)].parameter_count,
                       ranks_.shard_ranks, shard_rank(), plan_.placement.moments);
  }

 private:
  /// How far a task of the running graph has come.
  struct TaskState {
    bool issued = false;  // device lanes: enqueued
    bool ended = false;   // other lanes
  };

  /// What a task of a disk lane is waiting for: all of its requests.
  struct DiskTask {
    Impl* executor = nullptr;
    TaskId task = -1;
    std::atomic<int> remaining{0};
  };

  static constexpr size_t index(Lane lane) { return static_cast<size_t>(lane); }

  [[nodiscard]] int shard_rank() const { return ranks_.ranks > 1 ? groups_->shard->rank() : 0; }

  /// Where this rank's shard begins in a unit with all ranks' padding.
  [[nodiscard]] int64_t shard_first(int unit) const {
    return plan_.parts[static_cast<size_t>(unit)].parameter_count * shard_rank();
  }

  /// Of all ranks, in their order: the same sum on each of them.
  [[nodiscard]] double loss_sum() const {
    const auto* scalars = pointer_as<const double>(plan_.buffers.host_scalars);
    double sum = 0;
    for (int rank = 0; rank < ranks_.ranks; ++rank) sum += scalars_of(scalars, rank)[0];
    return sum;
  }
  /// Of the gradient, which the ranks of a shard group hold together.
  [[nodiscard]] double sum_of_squares() const {
    const auto* scalars = pointer_as<const double>(plan_.buffers.host_scalars);
    double sum = 0;
    for (int rank = 0; rank < ranks_.shard_ranks; ++rank) {
      for (size_t unit = 0; unit < model_.units().size(); ++unit) {
        sum += scalars_of(scalars, rank)[1 + unit];
      }
    }
    return sum;
  }
  [[nodiscard]] const double* scalars_of(const double* all, int rank) const {
    return all + static_cast<size_t>(rank) * (1 + model_.units().size());
  }

  [[nodiscard]] gpu::Stream& stream(Lane lane) { return *streams_[index(lane)]; }

  [[nodiscard]] std::byte* address(const Buffer& buffer) const {
    if (buffer.tier == Tier::kNvme) return nullptr;
    const gpu::Arena& arena = buffer.tier == Tier::kDevice ? *device_arena_ : *host_arena_;
    return arena.data() + buffer.offset_bytes;
  }

  [[nodiscard]] std::byte* pointer(BufferId id) const {
    return id == kNoBuffer ? nullptr : address_[static_cast<size_t>(id)];
  }

  template <class T>
  [[nodiscard]] T* pointer_as(BufferId id) const {
    return reinterpret_cast<T*>(pointer(id));
  }

  /// Where a rank's shard of a unit's state begins in its home.
  [[nodiscard]] std::byte* shard_pointer(BufferId home, int unit, StateKind kind) const {
    const bool is_place = kind == StateKind::kWeight && plan_.is_home_whole(unit);
    return pointer(home) + (is_place ? weight_offset(unit) : 0);
  }
  /// Of this rank's shard in a whole weight.
  [[nodiscard]] size_t weight_offset(int unit) const {
    return static_cast<size_t>(shard_first(unit)) * size_of(plan_.dtype);
  }

  [[nodiscard]] BufferId state_buffer(int unit, StateKind kind, size_t offset_bytes,
                                      size_t size_bytes) const {
    const BufferId id = plan_.home(unit, kind);
    STRATA_CHECK(id != kNoBuffer, "this placement keeps no such state");
    STRATA_CHECK(offset_bytes + size_bytes <= state_size_bytes(unit, kind),
                 "a range of the unit's state");
    return id;
  }

  /// The decay table of each part, and where its random numbers begin.
  void cut_segments() {
    uint64_t chunks = 0;
    for (size_t unit = 0; unit < model_.units().size(); ++unit) {
      const UnitSpec& spec = model_.units()[unit];
      const PartGeometry& geometry = plan_.parts[unit];
      first_chunk_.push_back(chunks);
      first_chunk_.back() +=
          static_cast<uint64_t>(shard_first(static_cast<int>(unit)) / cpu_adam::kChunkElements);
      chunks += static_cast<uint64_t>(
          cpu_adam::chunk_count(cpu_adam::Shard{.count = spec.parameter_count}));
      auto& of_unit = segments_.emplace_back();
      for (int part = 0; part < geometry.parts; ++part) {
        auto& of_part = of_unit.emplace_back();
        const int64_t begin = shard_first(static_cast<int>(unit)) + geometry.first(part);
        const int64_t end = begin + geometry.elements(part);
        int64_t at = 0;
        for (const cpu_adam::Segment& segment : spec.segments) {
          const int64_t from = std::max(at, begin);
          const int64_t to = std::min(at + segment.count, end);
          if (from < to) of_part.push_back({to - from, segment.decay});
          at += segment.count;
        }
        if (const int64_t padding = end - std::max(begin, at); padding > 0) {
          of_part.push_back({padding, false});
        }
      }
    }
  }

  void open_store(const NvmeOptions& options) {
    for (const UnitPlacement& unit : plan_.placement.units) {
      speculates_ = speculates_ || (plan_.placement.training && unit.update == Update::kSpeculated);
    }
    if (plan_.bytes(Tier::kNvme) == 0) return;
    STRATA_CHECK(!options.directories.empty(), "a directory for what is homed on NVMe");
    nvme_ = std::make_unique<NvmeTier>(plan_, options,
                                       std::span(host_arena_->data(), host_arena_->size_bytes()));
    StateCache cache;
    if (!plan_.buffers.state_slots.empty()) {
      for (size_t k = 0; k < kStateKinds; ++k) {
        const BufferId id = plan_.buffers.state_slots[0][k];
        if (id != kNoBuffer) cache[k] = {pointer(id), plan_.buffer(id).size_bytes};
      }
    }
    for (const auto& [kind, id] :
         {std::pair(StateKind::kWeight, plan_.buffers.weight_part_slot),
          std::pair(StateKind::kGradient, plan_.buffers.gradient_part_slot)}) {
      auto& memory = cache[static_cast<size_t>(kind)];
      if (memory.empty() && id != kNoBuffer) memory = {pointer(id), plan_.buffer(id).size_bytes};
    }
    nvme_->set_cache(cache);
    if (!options.open_existing) clear_padding_on_drives();
  }

  /// Nobody else writes padding, and drives give back only what was written. From the part on in
  /// which it begins.
  void clear_padding_on_drives() {
    for (int unit = 0; unit < static_cast<int>(model_.units().size()); ++unit) {
      const PartGeometry& geometry = plan_.parts[static_cast<size_t>(unit)];
      const int64_t count = shard(unit).count;
      if (count == geometry.parameter_count) continue;
      for (size_t k = 0; k < kStateKinds; ++k) {
        const auto kind = static_cast<StateKind>(k);
        const BufferId id = plan_.home(unit, kind);
        if (id == kNoBuffer || plan_.buffer(id).tier != Tier::kNvme) continue;
        const int first = static_cast<int>(count / geometry.part_elements);
        for (int part = first; part < geometry.parts; ++part) {
          const std::vector<std::byte> zeros(plan_.part_bytes(unit, kind, part));
          nvme_->write_state(unit, kind, plan_.part_offset_bytes(unit, kind, part), zeros);
        }
      }
    }
  }

  /// What was accepted holds, before anything looks at state.
  void settle_acceptance() {
    if (accepted_) commit({});
  }
  /// Likewise, and what was written by write_state is where the lanes look for it.
  void settle() {
    if (!nvme_) return;
    nvme_->flush();
    if (accepted_ || nvme_->has_shadows()) commit_as_is();
  }
  void commit_as_is() {
    // A deferred update that is pending stays so: its state has one slot and is not committed.
    const bool pending = pending_;
    pending_ = false;
    commit({});
    pending_ = pending;
  }

  void write_constants() {
    const size_t size = model_.constants_bytes();
    std::vector<std::byte> table(size);
    model_.write_constants(table);
    copy_in(pointer(plan_.buffers.constants), Tier::kDevice, table);
  }

  void copy_in(std::byte* destination, Tier tier, std::span<const std::byte> data) {
    if (tier == Tier::kHost) {
      std::memcpy(destination, data.data(), data.size());
      return;
    }
    for (size_t done = 0; done < data.size(); done += kStagingBytes) {
      const size_t piece = std::min(kStagingBytes, data.size() - done);
      std::memcpy(pointer(plan_.buffers.staging), data.data() + done, piece);
      device_.copy_async(destination + done, pointer(plan_.buffers.staging), piece,
                         gpu::CopyDirection::kUpload, stream(Lane::kUpload));
      device_.synchronize(stream(Lane::kUpload));
    }
  }

  void copy_out(const std::byte* source, Tier tier, std::span<std::byte> out) {
    if (tier == Tier::kHost) {
      std::memcpy(out.data(), source, out.size());
      return;
    }
    for (size_t done = 0; done < out.size(); done += kStagingBytes) {
      const size_t piece = std::min(kStagingBytes, out.size() - done);
      device_.copy_async(pointer(plan_.buffers.staging), source + done, piece,
                         gpu::CopyDirection::kDownload, stream(Lane::kDownload));
      device_.synchronize(stream(Lane::kDownload));
      std::memcpy(out.data() + done, pointer(plan_.buffers.staging), piece);
    }
  }

  void stage(std::span<const HostMicroBatch> micro_batches) {
    const StepShape& shape = plan_.shape;
    STRATA_CHECK(static_cast<int64_t>(micro_batches.size()) == shape.micro_batches,
                 "as many micro-batches as planned");
    const BatchLayout layout = batch_layout(shape);
    for (size_t m = 0; m < micro_batches.size(); ++m) {
      const HostMicroBatch& batch = micro_batches[m];
      const auto& offsets = batch.sequence_offsets;
      STRATA_CHECK(static_cast<int64_t>(batch.token_ids.size()) == shape.tokens &&
                       batch.targets.size() == batch.token_ids.size() &&
                       batch.positions.size() == batch.token_ids.size(),
                   "arrays of the planned number of tokens");
      STRATA_CHECK(
          !offsets.empty() && static_cast<int64_t>(offsets.size()) <= shape.max_sequences + 1,
          "no more documents than planned");
      std::byte* to = pointer(plan_.buffers.staged_batch[m]);
      const auto put = [to](size_t offset, std::span<const int32_t> values) {
        std::memcpy(to + offset, values.data(), values.size_bytes());
      };
      put(layout.token_ids, batch.token_ids);
      put(layout.targets, batch.targets);
      put(layout.positions, batch.positions);
      put(layout.sequence_offsets, offsets);
      sequences_[m] = static_cast<int64_t>(offsets.size()) - 1;
      max_sequence_[m] = 0;
      for (size_t i = 1; i < offsets.size(); ++i) {
        max_sequence_[m] = std::max<int64_t>(max_sequence_[m], offsets[i] - offsets[i - 1]);
      }
    }
  }

  /// Runs a graph: the calling thread enqueues the tasks of device lanes in order as soon as what
  /// they wait for on other lanes has ended; what they wait for on streams is left to events.
  void run(const StepGraph& graph) {
    {
      const std::lock_guard lock(mutex_);
      std::fill(state_.begin(), state_.end(), TaskState{});
      for (auto* times : {&begin_ns_, &end_ns_}) {
        for (int64_t& time : *times) set_ns(time, 0);
      }
      for (auto& tasks : lane_tasks_) tasks.clear();
      for (size_t t = 0; t < graph.size(); ++t) {
        lane_tasks_[index(graph[t].lane)].push_back(static_cast<TaskId>(t));
      }
      next_.fill(0);
      error_ = nullptr;
      unended_ = 0;
      for (const Lane lane : kHostLanes) unended_ += lane_tasks_[index(lane)].size();
      start_ns_ = now_ns();
      graph_ = &graph;
    }
    changed_.notify_all();
    try {
      dispatch(graph);
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    std::unique_lock lock(mutex_);
    changed_.notify_all();
    changed_.wait(lock, [&] { return under_way_ == 0 && (error_ || unended_ == 0); });
    std::exception_ptr error = error_;
    lock.unlock();
    for (const Lane lane : kDeviceLanes) {
      if (streams_[index(lane)] == nullptr) continue;
      try {
        device_.synchronize(stream(lane));
      } catch (...) {
        if (!error) error = std::current_exception();
      }
    }
    // Until now, as what is enqueued may be most of a step and activity() tells of it.
    lock.lock();
    graph_ = nullptr;
    lock.unlock();
    if (error) std::rethrow_exception(error);
  }

  void dispatch(const StepGraph& graph) {
    while (true) {
      bool progress = false;
      bool finished = true;
      for (const Lane lane : kDeviceLanes) {
        const auto& tasks = lane_tasks_[index(lane)];
        size_t& at = next_[index(lane)];
        while (at < tasks.size() && ready(graph, tasks[at])) {
          issue(graph, tasks[at]);
          ++at;
          progress = true;
        }
        finished = finished && at == tasks.size();
      }
      if (finished) return;
      if (progress) continue;
      // All heads wait for other lanes: look again when those have ended something.
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        return error_ || std::any_of(kDeviceLanes.begin(), kDeviceLanes.end(), [&](Lane lane) {
                 const auto& tasks = lane_tasks_[index(lane)];
                 const size_t at = next_[index(lane)];
                 return at < tasks.size() && ready_locked(graph, tasks[at]);
               });
      });
      if (error_) return;
    }
  }

  [[nodiscard]] bool ready(const StepGraph& graph, TaskId task) {
    const std::lock_guard lock(mutex_);
    return ready_locked(graph, task);
  }

  /// Whether all that the task waits for has been enqueued (device lanes) or has ended (others).
  [[nodiscard]] bool ready_locked(const StepGraph& graph, TaskId task) const {
    const auto& after = graph[static_cast<size_t>(task)].after;
    return std::all_of(after.begin(), after.end(), [&](TaskId earlier) {
      const TaskState& state = state_[static_cast<size_t>(earlier)];
      return is_device_lane(graph[static_cast<size_t>(earlier)].lane) ? state.issued : state.ended;
    });
  }

  void issue(const StepGraph& graph, TaskId id) {
    const auto i = static_cast<size_t>(id);
    const Task& task = graph[i];
    gpu::Stream& lane = stream(task.lane);
    for (const TaskId earlier : task.after) {
      const auto e = static_cast<size_t>(earlier);
      if (is_device_lane(graph[e].lane)) device_.wait_async(lane, *events_[e]);
    }
    device_.stamp_async(&begin_ns_[i], lane);
    enqueue(task, lane);
    device_.stamp_async(&end_ns_[i], lane);
    device_.record_async(*events_[i], lane);
    {
      const std::lock_guard lock(mutex_);
      state_[i].issued = true;
    }
    changed_.notify_all();
  }

  void enqueue(const Task& task, gpu::Stream& lane) {
    const Buffers& b = plan_.buffers;
    const auto m = static_cast<size_t>(std::max(task.micro_batch, 0));
    const auto u = static_cast<size_t>(std::max(task.unit, 0));
    switch (task.kind) {
      case TaskKind::kUploadBatch:
        device_.copy_async(pointer(b.batch[m]), pointer(b.staged_batch[m]), task.moved_bytes,
                           gpu::CopyDirection::kUpload, lane);
        return;
      case TaskKind::kUploadWeight: {
        const size_t offset = plan_.part_offset_bytes(task.unit, StateKind::kWeight, task.part);
        device_.copy_async(pointer(task.weight) + weight_offset(task.unit) + offset,
                           part_address(task.source, task.unit, StateKind::kWeight, offset),
                           task.moved_bytes, gpu::CopyDirection::kUpload, lane);
        return;
      }
      case TaskKind::kDownloadGradient: {
        const size_t offset = plan_.part_offset_bytes(task.unit, StateKind::kGradient, task.part);
        device_.copy_async(part_address(task.destination, task.unit, StateKind::kGradient, offset),
                           pointer(task.gradient) + offset, task.moved_bytes,
                           gpu::CopyDirection::kDownload, lane);
        return;
      }
      case TaskKind::kUploadActivation:
      case TaskKind::kDownloadActivation:
        device_.copy_async(pointer(task.destination), pointer(task.source), task.moved_bytes,
                           task.kind == TaskKind::kUploadActivation ? gpu::CopyDirection::kUpload
                                                                    : gpu::CopyDirection::kDownload,
                           lane);
        return;
      case TaskKind::kClearScalars:
        device_.fill_zero_async(pointer(b.scalars), plan_.buffer(b.scalars).size_bytes, lane);
        return;
      case TaskKind::kForward:
        model_.forward(task.unit, unit_call(task, lane));
        return;
      case TaskKind::kBackward:
        model_.backward(task.unit, unit_call(task, lane));
        return;
      case TaskKind::kLoss:
        if (logits_row_ >= 0) {
          model_.logits(unit_call(task, lane), logits_row_, pointer_as<float>(b.logits));
        } else {
          model_.loss(unit_call(task, lane));
        }
        return;
      case TaskKind::kRoundGradient:
        clear_padding(task.accumulator, DType::kF32, task.unit, lane);
        device_.operators().cast({.count = plan_.whole_elements(task.unit),
                                  .in_dtype = DType::kF32,
                                  .out_dtype = ranks_.reduce_dtype,
                                  .in = pointer(task.accumulator),
                                  .out = pointer(task.destination)},
                                 lane);
        return;
      case TaskKind::kReduceGradient: {
        const DType dtype = ranks_.reduce_dtype;
        const int64_t count = plan_.parts[u].parameter_count;
        std::byte* shard = pointer(task.accumulator) +
                           static_cast<size_t>(shard_first(task.unit)) * size_of(dtype);
        if (dtype == DType::kF32) clear_padding(task.accumulator, dtype, task.unit, lane);
        if (ranks_.shard_ranks > 1) {
          groups_->shard->reduce_scatter_async(pointer(task.accumulator), shard, count, dtype,
                                               lane);
        }
        if (ranks_.replicas() > 1) groups_->replica->all_reduce_async(shard, count, dtype, lane);
        return;
      }
      case TaskKind::kGatherScalars:
        groups_->world->all_gather_async(pointer(b.scalars), pointer(b.all_scalars),
                                         plan_.buffer(b.scalars).size_bytes, lane);
        return;
      case TaskKind::kGatherWeight: {
        const size_t size_bytes =
            static_cast<size_t>(plan_.parts[u].parameter_count) * size_of(plan_.dtype);
        const std::byte* shard =
            pointer(task.source) + (task.source == task.weight ? weight_offset(task.unit) : 0);
        groups_->shard->all_gather_async(shard, pointer(task.weight), size_bytes, lane);
        return;
      }
      case TaskKind::kFinishGradient: {
        const int64_t count = plan_.parts[u].parameter_count;
        float* accumulated = pointer_as<float>(task.accumulator) + shard_first(task.unit);
        if (task.source != kNoBuffer) {
          device_.operators().cast(
              {.count = count,
               .in_dtype = ranks_.reduce_dtype,
               .out_dtype = DType::kF32,
               .in = pointer(task.source) +
                     static_cast<size_t>(shard_first(task.unit)) * size_of(ranks_.reduce_dtype),
               .out = accumulated},
              lane);
        }
        device_.operators().finish_gradient(
            {.count = count,
             .gradient_dtype = plan_.dtype,
             .accumulated = accumulated,
             .gradient = pointer(task.gradient),
             .sum_of_squares = pointer_as<double>(b.scalars) + 1 + u,
             .scratch = pointer(b.workspace)},
            lane);
        return;
      }
      case TaskKind::kDownloadScalars:
        device_.copy_async(pointer(b.host_scalars), pointer(b.all_scalars), task.moved_bytes,
                           gpu::CopyDirection::kDownload, lane);
        return;
      case TaskKind::kAdam: {
        if (!pending_) return;
        const auto& segments = segments_[u].front();
        device_.operators().adam({.shard = shard(task, deferred_),
                                  .segments = segments.data(),
                                  .segment_count = static_cast<int64_t>(segments.size()),
                                  .constants = deferred_.constants},
                                 lane);
        return;
      }
      case TaskKind::kReadState:
      case TaskKind::kWriteState:
      case TaskKind::kReadActivation:
      case TaskKind::kWriteActivation:
        STRATA_CHECK(false, "drives have lanes of their own");
    }
  }

  /// No backward pass writes what is behind a unit's parameters.
  void clear_padding(BufferId gradient, DType dtype, int unit, gpu::Stream& lane) {
    const auto count =
        static_cast<size_t>(model_.units()[static_cast<size_t>(unit)].parameter_count);
    const auto whole = static_cast<size_t>(plan_.whole_elements(unit));
    if (count == whole) return;
    device_.fill_zero_async(pointer(gradient) + count * size_of(dtype),
                            (whole - count) * size_of(dtype), lane);
  }

  /// A part's bytes where the whole of the kind's state lies, or in memory for one part alone.
  [[nodiscard]] std::byte* part_address(BufferId id, int unit, StateKind kind,
                                        size_t offset_bytes) const {
    const bool whole = id == plan_.home(unit, kind) ||
                       id == plan_.buffers.weight_shadow[static_cast<size_t>(unit)];
    return pointer(id) + (whole ? offset_bytes : 0);
  }

  [[nodiscard]] UnitCall unit_call(const Task& task, gpu::Stream& lane) const {
    const Buffers& b = plan_.buffers;
    const auto m = static_cast<size_t>(task.micro_batch);
    const std::byte* batch = pointer(b.batch[m]);
    const BatchLayout layout = batch_layout(plan_.shape);
    const auto array = [batch](size_t offset) {
      return reinterpret_cast<const int32_t*>(batch + offset);
    };
    const bool backward = task.kind == TaskKind::kBackward || task.with_backward;
    return {.device = device_,
            .stream = lane,
            .batch = {.tokens = plan_.shape.tokens,
                      .sequences = sequences_[m],
                      .max_sequence = max_sequence_[m],
                      .token_ids = array(layout.token_ids),
                      .targets = array(layout.targets),
                      .positions = array(layout.positions),
                      .sequence_offsets = array(layout.sequence_offsets)},
            .constants = pointer(b.constants),
            .workspace = pointer(b.workspace),
            .saved = task.level,
            .saved_activations = pointer(task.saved),
            .weight = pointer(task.weight),
            .shared_weight = pointer(task.shared_weight),
            .input = pointer(task.input),
            .output = pointer(task.output),
            .boundary_gradient = backward ? pointer(b.boundary_gradient[m]) : nullptr,
            .gradient = pointer_as<float>(task.accumulator),
            .accumulate = task.accumulate,
            .shared_gradient = pointer_as<float>(task.shared_accumulator),
            .accumulate_shared = task.accumulate_shared,
            .loss_scale = loss_scale_,
            .loss_sum = pointer_as<double>(b.scalars)};
  }

  [[nodiscard]] cpu_adam::Shard shard(const Task& task, const UpdateConstants& update) const {
    const auto u = static_cast<size_t>(task.unit);
    const PartGeometry& geometry = plan_.parts[u];
    const auto at = [&](StateKind kind) -> std::byte* {
      const BufferId in_slot = task.slot[static_cast<size_t>(kind)];
      if (in_slot != kNoBuffer) return pointer(in_slot);
      const BufferId home = plan_.home(task.unit, kind);
      return home == kNoBuffer ? nullptr
                               : shard_pointer(home, task.unit, kind) +
                                     plan_.part_offset_bytes(task.unit, kind, task.part);
    };
    std::byte* weight = at(StateKind::kWeight);
    std::byte* weight_out = weight;
    const BufferId shadow = plan_.buffers.weight_shadow[u];
    if (task.speculated && shadow != kNoBuffer) {
      weight_out =
          pointer(shadow) + plan_.part_offset_bytes(task.unit, StateKind::kWeight, task.part);
    }
    auto* residual = reinterpret_cast<uint16_t*>(at(StateKind::kResidual));
    std::byte* moment1 = at(StateKind::kMoment1);
    std::byte* moment2 = at(StateKind::kMoment2);
    return {.count = geometry.elements(task.part),
            .weight_dtype = plan_.dtype,
            .gradient_dtype = plan_.dtype,
            .moment_format = plan_.placement.moments,
            .gradient = at(StateKind::kGradient),
            .weight = weight,
            .residual = residual,
            .moment1 = moment1,
            .moment2 = moment2,
            .weight_out = weight_out,
            .residual_out = residual,
            .moment1_out = moment1,
            .moment2_out = moment2,
            .first_chunk = first_chunk_[u] + static_cast<uint64_t>(geometry.first(task.part) /
                                                                   cpu_adam::kChunkElements),
            .seed = update.seed,
            .step = update.step};
  }

  /// One lane that is not the device's: its tasks in order, each when what it waits for has ended.
  void run_lane(Lane lane, const std::stop_token& stop) {
    const auto& tasks = lane_tasks_[index(lane)];
    size_t& next = next_[index(lane)];
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] {
        return stop.stop_requested() ||
               (graph_ && !error_ && next < tasks.size() && ready_locked(*graph_, tasks[next]));
      });
      if (stop.stop_requested()) return;
      const StepGraph& graph = *graph_;
      const TaskId id = tasks[next];
      ++next;
      ++under_way_;
      lock.unlock();
      std::exception_ptr error;
      bool ended = true;
      try {
        for (const TaskId earlier : graph[static_cast<size_t>(id)].after) {
          const auto e = static_cast<size_t>(earlier);
          if (is_device_lane(graph[e].lane)) device_.synchronize(*events_[e]);
        }
        set_ns(begin_ns_[static_cast<size_t>(id)], now_ns());
        if (lane == Lane::kCpu) {
          run_on_cpu(graph[static_cast<size_t>(id)]);
        } else {
          ended = submit(graph[static_cast<size_t>(id)], id);
        }
      } catch (...) {
        error = std::current_exception();
      }
      if (ended) end(id, error);
      lock.lock();
    }
  }

  /// A task of a lane that is not the device's has ended.
  void end(TaskId id, const std::exception_ptr& error) {
    {
      const std::lock_guard lock(mutex_);
      set_ns(end_ns_[static_cast<size_t>(id)], now_ns());
      if (error && !error_) error_ = error;
      state_[static_cast<size_t>(id)].ended = !error;
      --unended_;
      --under_way_;
      // While the lock is held: the executor may be gone as soon as nothing is under way.
      changed_.notify_all();
    }
  }

  void run_on_cpu(const Task& task) {
    STRATA_CHECK(task.kind == TaskKind::kAdam, "the cpu lane runs the optimizer");
    if (!task.speculated && !pending_) return;
    const UpdateConstants& update = task.speculated ? speculated_ : deferred_;
    cpu_adam::update(adam_arena_, shard(task, update),
                     segments_[static_cast<size_t>(task.unit)][static_cast<size_t>(task.part)],
                     update.constants);
  }

  /// Whether a task would write what an update has made that does not happen.
  [[nodiscard]] bool is_idle(const Task& task) const {
    return !pending_ && !task.speculated && task.kind == TaskKind::kWriteState &&
           !contains(task.kinds, StateKind::kGradient);
  }

  /// The kinds that a task moves now: what is read for an update that does not happen is only what
  /// compute waits for.
  [[nodiscard]] KindSet kinds_of(const Task& task) const {
    const bool idle = !pending_ && !task.speculated && task.kind == TaskKind::kReadState;
    return idle ? static_cast<KindSet>(task.kinds & kind_bit(StateKind::kWeight)) : task.kinds;
  }

  /// Submits a disk task's requests; false if it ends later, when the last of them has.
  bool submit(const Task& task, TaskId id) {
    const KindSet kinds = kinds_of(task);
    const bool moves_state =
        task.kind == TaskKind::kReadState || task.kind == TaskKind::kWriteState;
    if (is_idle(task) || (moves_state && kinds == 0)) return true;
    DiskTask& state = requests_[static_cast<size_t>(id)];
    state.executor = this;
    state.task = id;
    int count = 1;  // this call itself, so that the task cannot end before all are submitted
    for (size_t k = 0; k < kStateKinds; ++k) count += contains(kinds, static_cast<StateKind>(k));
    if (!moves_state) ++count;
    state.remaining.store(count);
    std::exception_ptr error;
    int submitted = 0;
    const auto move = [&](BufferId record, size_t offset, std::byte* memory, size_t size) {
      const nvme::StoreSink sink{.done = &Impl::request_ended, .context = &state};
      const bool is_read =
          task.kind == TaskKind::kReadState || task.kind == TaskKind::kReadActivation;
      if (is_read) {
        nvme_->read_async(record, offset, memory, size,
                          task.lane == Lane::kReadWeight ? nvme::Priority::kWeightRead
                                                         : nvme::Priority::kStateRead,
                          static_cast<uint64_t>(id), sink);
      } else {
        nvme_->write_async(record, offset, memory, size, nvme::Priority::kWriteBack,
                           static_cast<uint64_t>(id), sink);
      }
      ++submitted;
    };
    try {
      if (task.kind == TaskKind::kReadActivation) {
        move(task.source, 0, pointer(task.destination), task.moved_bytes);
      } else if (task.kind == TaskKind::kWriteActivation) {
        move(task.destination, 0, pointer(task.source), task.moved_bytes);
      } else {
        for (size_t k = 0; k < kStateKinds; ++k) {
          const auto kind = static_cast<StateKind>(k);
          if (!contains(kinds, kind)) continue;
          move(plan_.home(task.unit, kind),
               static_cast<size_t>(task.part) * plan_.record_stride_bytes(task.unit, kind),
               pointer(task.slot[k]), plan_.part_bytes(task.unit, kind, task.part));
        }
      }
    } catch (...) {
      error = std::current_exception();
    }
    // Requests that were not submitted will not end, and neither will this call again.
    const int done = count - submitted;
    if (error) fail(error);
    return state.remaining.fetch_sub(done) == done;
  }

  /// Keeps the first error; the graph ends when nothing is under way.
  void fail(const std::exception_ptr& error) {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = error;
    changed_.notify_all();
  }

  static void request_ended(void* context, const nvme::StoreResult& result) noexcept {
    auto& state = *static_cast<DiskTask*>(context);
    Impl& executor = *state.executor;
    if (!result.ok()) executor.fail(std::make_exception_ptr(failure(std::string(result.error))));
    if (state.remaining.fetch_sub(1) == 1) executor.end(state.task, nullptr);
  }

  [[nodiscard]] static UpdateConstants constants_of(const OptimizerRule& rule, double coefficient) {
    return {cpu_adam::step_constants(rule.hyper, rule.step, coefficient), rule.seed, rule.step};
  }

  void note_times() {
    double last = 0;
    for (size_t t = 0; t < plan_.train.size(); ++t) {
      const auto seconds = [&](int64_t ns) { return static_cast<double>(ns - start_ns_) * 1e-9; };
      timeline_.tasks[t] = {seconds(begin_ns_[t]), seconds(end_ns_[t])};
      last = std::max(last, timeline_.tasks[t].end_s);
    }
    timeline_.seconds = last;
  }

  gpu::Device& device_;
  const UnitModel& model_;
  const Plan plan_;
  const RankLayout ranks_;
  const comm::RankGroups* groups_;  // null with one rank
  tbb::task_arena adam_arena_;
  std::unique_ptr<gpu::Arena> device_arena_, host_arena_;
  std::vector<std::byte*> address_;  // [buffer]; null on NVMe
  std::unique_ptr<NvmeTier> nvme_;
  std::array<std::unique_ptr<gpu::Stream>, kLanes> streams_;
  std::vector<std::unique_ptr<gpu::Event>> events_;  // [task]
  std::vector<int64_t> sequences_, max_sequence_;    // [micro-batch]
  std::vector<uint64_t> first_chunk_;                // [unit], over all parameters
  std::vector<std::vector<std::vector<cpu_adam::Segment>>> segments_;  // [unit][part]
  bool speculates_ = false;

  float loss_scale_ = 0;
  int64_t logits_row_ = -1;
  bool pending_ = false;   // deferred updates
  bool accepted_ = false;  // speculated updates that are not yet committed
  UpdateConstants deferred_, speculated_;
  std::vector<int64_t> begin_ns_, end_ns_;  // [task]
  int64_t start_ns_ = 0;
  Timeline timeline_;
  std::vector<DiskTask> requests_;  // [task]

  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  const StepGraph* graph_ = nullptr;  // what is running
  std::array<std::vector<TaskId>, kLanes> lane_tasks_;
  std::array<size_t, kLanes> next_{};  // of device lanes: the dispatcher's own
  std::vector<TaskState> state_;       // [task]
  size_t unended_ = 0;                 // tasks of lanes that are not the device's
  size_t under_way_ = 0;               // of them, begun
  std::exception_ptr error_;
  std::vector<std::jthread> threads_;
};

Executor::Executor(gpu::Device& device, const UnitModel& model, Plan plan, ExecutorOptions options)
    : impl_(std::make_unique<Impl>(device, model, std::move(plan), options)) {}
Executor::~Executor() = default;

const Plan& Executor::plan() const noexcept { return impl_->plan(); }
StepResult Executor::train_step(std::span<const HostMicroBatch> micro_batches, float loss_scale,
                                const OptimizerRule& rule) {
  return impl_->train_step(micro_batches, loss_scale, rule);
}
void Executor::finish_update() { impl_->finish_update(); }
void Executor::commit(std::span<const std::byte> metadata) { impl_->commit(metadata); }
std::span<const std::byte> Executor::metadata() const { return impl_->metadata(); }
const NvmeTier* Executor::nvme() const noexcept { return impl_->nvme(); }
double Executor::evaluate(std::span<const HostMicroBatch> micro_batches) {
  return impl_->evaluate(micro_batches);
}
void Executor::logits(const HostMicroBatch& micro_batch, int64_t row, std::span<float> out) {
  impl_->logits(micro_batch, row, out);
}
void Executor::read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out) {
  impl_->read_state(unit, kind, offset_bytes, out);
}
void Executor::write_state(int unit, StateKind kind, size_t offset_bytes,
                           std::span<const std::byte> data) {
  impl_->write_state(unit, kind, offset_bytes, data);
}
size_t Executor::state_size_bytes(int unit, StateKind kind) const {
  return impl_->state_size_bytes(unit, kind);
}
ElementRange Executor::shard(int unit) const { return impl_->shard(unit); }
Activity Executor::activity() const { return impl_->activity(); }
const Timeline& Executor::timeline() const noexcept { return impl_->timeline(); }

}  // namespace strata::pipeline
