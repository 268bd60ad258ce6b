#include "pipeline/executor.h"

#include <pthread.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <exception>
#include <mutex>
#include <thread>

#include "base/error.h"
#include "gpu/operators.h"
#include "pipeline/batch_layout.h"

namespace strata::pipeline {
namespace {

constexpr std::array kDeviceLanes{Lane::kUpload, Lane::kCompute, Lane::kDownload};

}  // namespace

class Executor::Impl {
 public:
  Impl(gpu::Device& device, const UnitModel& model, Plan plan, int cpu_threads)
      : device_(device),
        model_(model),
        plan_(std::move(plan)),
        adam_arena_(cpu_threads > 0 ? cpu_threads : tbb::task_arena::automatic) {
    device_arena_ = device_.allocate_device_memory(plan_.bytes(Tier::kDevice));
    host_arena_ = device_.allocate_host_memory(plan_.bytes(Tier::kHost));
    for (const Lane lane : kDeviceLanes) {
      streams_[index(lane)] = device_.create_stream(std::string(name_of(lane)));
    }
    for (const StepGraph* graph : {&plan_.train, &plan_.update, &plan_.evaluate}) {
      most_tasks_ = std::max(most_tasks_, graph->size());
    }
    for (size_t i = 0; i < most_tasks_; ++i) events_.push_back(device_.create_event());
    issued_.resize(most_tasks_);
    ended_.resize(most_tasks_);
    sequences_.resize(static_cast<size_t>(plan_.shape.micro_batches));
    max_sequence_.resize(static_cast<size_t>(plan_.shape.micro_batches));
    for (auto& queue : lane_tasks_) queue.reserve(most_tasks_);
    write_constants();
    cpu_lane_ = std::jthread([this](const std::stop_token& stop) { run_cpu_lane(stop); });
    pthread_setname_np(cpu_lane_.native_handle(), "cpu");
  }

  ~Impl() {
    {
      const std::lock_guard lock(mutex_);  // so that the lane cannot miss it between look and sleep
      cpu_lane_.request_stop();
    }
    changed_.notify_all();
    cpu_lane_.join();
    // Streams drain as they go, before the arenas that their work points into.
    for (auto& stream : streams_) stream.reset();
  }

  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  [[nodiscard]] const Plan& plan() const noexcept { return plan_; }

  ForwardBackwardResult forward_backward(std::span<const HostMicroBatch> micro_batches,
                                         float loss_scale) {
    stage(micro_batches);
    loss_scale_ = loss_scale;
    run(plan_.train);
    pending_ = false;
    const auto* scalars = pointer_as<const double>(plan_.buffers.host_scalars);
    ForwardBackwardResult result{.loss_sum = scalars[0]};
    for (size_t unit = 0; unit < model_.units().size(); ++unit) {
      result.sum_of_squares += scalars[1 + unit];
    }
    return result;
  }

  void set_pending_update(const cpu_adam::StepConstants& constants) {
    STRATA_CHECK(!pending_, "the update before this one has not run");
    constants_ = constants;
    pending_ = true;
  }

  void finish_update() {
    if (!pending_) return;
    run(plan_.update);
    pending_ = false;
  }

  double evaluate(std::span<const HostMicroBatch> micro_batches) {
    finish_update();
    stage(micro_batches);
    run(plan_.evaluate);
    return pointer_as<const double>(plan_.buffers.host_scalars)[0];
  }

  void logits(const HostMicroBatch& micro_batch, int64_t row, std::span<float> out) {
    STRATA_CHECK(plan_.shape.micro_batches == 1 && plan_.buffers.logits != kNoBuffer,
                 "logits are for inference plans of one micro-batch");
    STRATA_CHECK(static_cast<int64_t>(out.size()) == model_.vocabulary(), "one logit a token");
    finish_update();
    stage({&micro_batch, 1});
    logits_row_ = row;
    run(plan_.evaluate);
    logits_row_ = -1;
    copy_out(pointer(plan_.buffers.logits), Tier::kDevice, std::as_writable_bytes(out));
  }

  void read_state(int unit, StateKind kind, size_t offset_bytes, std::span<std::byte> out) {
    finish_update();
    const Buffer& buffer = state_buffer(unit, kind, offset_bytes, out.size());
    copy_out(address(buffer) + offset_bytes, buffer.tier, out);
  }

  void write_state(int unit, StateKind kind, size_t offset_bytes, std::span<const std::byte> data) {
    finish_update();
    const Buffer& buffer = state_buffer(unit, kind, offset_bytes, data.size());
    copy_in(address(buffer) + offset_bytes, buffer.tier, data);
  }

  [[nodiscard]] size_t state_size_bytes(int unit, StateKind kind) const {
    const BufferId id = plan_.buffers.home[static_cast<size_t>(unit)][static_cast<size_t>(kind)];
    return id == kNoBuffer ? 0 : plan_.buffers.all[static_cast<size_t>(id)].size_bytes;
  }

 private:
  static constexpr size_t index(Lane lane) { return static_cast<size_t>(lane); }

  [[nodiscard]] gpu::Stream& stream(Lane lane) { return *streams_[index(lane)]; }

  [[nodiscard]] std::byte* address(const Buffer& buffer) const {
    const gpu::Arena& arena = buffer.tier == Tier::kDevice ? *device_arena_ : *host_arena_;
    return arena.data() + buffer.offset_bytes;
  }

  [[nodiscard]] std::byte* pointer(BufferId id) const {
    return id == kNoBuffer ? nullptr : address(plan_.buffers.all[static_cast<size_t>(id)]);
  }

  template <class T>
  [[nodiscard]] T* pointer_as(BufferId id) const {
    return reinterpret_cast<T*>(pointer(id));
  }

  [[nodiscard]] const Buffer& state_buffer(int unit, StateKind kind, size_t offset_bytes,
                                           size_t size_bytes) const {
    const BufferId id = plan_.buffers.home[static_cast<size_t>(unit)][static_cast<size_t>(kind)];
    STRATA_CHECK(id != kNoBuffer, "this placement keeps no such state");
    const Buffer& buffer = plan_.buffers.all[static_cast<size_t>(id)];
    STRATA_CHECK(offset_bytes + size_bytes <= buffer.size_bytes, "a range of the unit's state");
    return buffer;
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

  /// Dispatches a graph: each device lane's tasks are enqueued in order as soon as what they wait
  /// for on the cpu lane has ended; what they wait for on other streams is left to events.
  void run(const StepGraph& graph) {
    {
      const std::lock_guard lock(mutex_);
      std::fill(issued_.begin(), issued_.end(), false);
      std::fill(ended_.begin(), ended_.end(), false);
      for (auto& tasks : lane_tasks_) tasks.clear();
      for (size_t t = 0; t < graph.size(); ++t) {
        lane_tasks_[index(graph[t].lane)].push_back(static_cast<TaskId>(t));
      }
      error_ = nullptr;
      graph_ = &graph;
      cpu_next_ = 0;
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
    changed_.wait(lock, [&] {
      return !cpu_busy_ && (error_ || cpu_next_ == lane_tasks_[index(Lane::kCpu)].size());
    });
    graph_ = nullptr;
    const std::exception_ptr error = error_;
    lock.unlock();
    for (const Lane lane : kDeviceLanes) {
      try {
        device_.synchronize(stream(lane));
      } catch (...) {
        if (!error) throw;
      }
    }
    if (error) std::rethrow_exception(error);
  }

  void dispatch(const StepGraph& graph) {
    std::array<size_t, kLanes> next{};
    while (true) {
      bool progress = false;
      bool finished = true;
      for (const Lane lane : kDeviceLanes) {
        const auto& tasks = lane_tasks_[index(lane)];
        size_t& at = next[index(lane)];
        while (at < tasks.size() && ready(graph, tasks[at])) {
          issue(graph, tasks[at]);
          ++at;
          progress = true;
        }
        finished = finished && at == tasks.size();
      }
      if (finished) return;
      if (progress) continue;
      // All heads wait for the cpu lane: look again when it has ended something.
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] {
        return error_ || std::any_of(kDeviceLanes.begin(), kDeviceLanes.end(), [&](Lane lane) {
                 const auto& tasks = lane_tasks_[index(lane)];
                 const size_t at = next[index(lane)];
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

  /// Whether all that the task waits for has been enqueued (device lanes) or has ended (cpu lane).
  [[nodiscard]] bool ready_locked(const StepGraph& graph, TaskId task) const {
    const auto& after = graph[static_cast<size_t>(task)].after;
    return std::all_of(after.begin(), after.end(), [&](TaskId earlier) {
      const auto e = static_cast<size_t>(earlier);
      return graph[e].lane == Lane::kCpu ? ended_[e] : issued_[e];
    });
  }

  void issue(const StepGraph& graph, TaskId id) {
    const auto i = static_cast<size_t>(id);
    const Task& task = graph[i];
    gpu::Stream& lane = stream(task.lane);
    for (const TaskId earlier : task.after) {
      const auto e = static_cast<size_t>(earlier);
      if (graph[e].lane != Lane::kCpu) device_.wait_async(lane, *events_[e]);
    }
    enqueue(task, lane);
    device_.record_async(*events_[i], lane);
    {
      const std::lock_guard lock(mutex_);
      issued_[i] = true;
    }
    changed_.notify_all();
  }

  void enqueue(const Task& task, gpu::Stream& lane) {
    const Buffers& b = plan_.buffers;
    const auto m = static_cast<size_t>(std::max(task.micro_batch, 0));
    const auto u = static_cast<size_t>(std::max(task.unit, 0));
    switch (task.kind) {
      case TaskKind::kUploadBatch:
        device_.copy_async(pointer(b.batch[m]), pointer(b.staged_batch[m]),
                           batch_layout(plan_.shape).size_bytes, gpu::CopyDirection::kUpload, lane);
        return;
      case TaskKind::kUploadWeight:
        device_.copy_async(
            pointer(task.weight), pointer(b.home[u][static_cast<size_t>(StateKind::kWeight)]),
            state_size_bytes(task.unit, StateKind::kWeight), gpu::CopyDirection::kUpload, lane);
        return;
      case TaskKind::kClearScalars:
        device_.fill_zero_async(pointer(b.scalars),
                                b.all[static_cast<size_t>(b.scalars)].size_bytes, lane);
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
      case TaskKind::kFinishGradient:
        device_.operators().finish_gradient(
            {.count = model_.units()[u].parameter_count,
             .gradient_dtype = model_.dtype(),
             .accumulated = pointer_as<const float>(task.accumulator),
             .gradient = pointer(task.gradient),
             .sum_of_squares = pointer_as<double>(b.scalars) + 1 + u,
             .scratch = pointer(b.workspace)},
            lane);
        return;
      case TaskKind::kDownloadGradient:
        device_.copy_async(
            pointer(b.home[u][static_cast<size_t>(StateKind::kGradient)]), pointer(task.gradient),
            state_size_bytes(task.unit, StateKind::kGradient), gpu::CopyDirection::kDownload, lane);
        return;
      case TaskKind::kDownloadScalars:
        device_.copy_async(pointer(b.host_scalars), pointer(b.scalars),
                           b.all[static_cast<size_t>(b.scalars)].size_bytes,
                           gpu::CopyDirection::kDownload, lane);
        return;
      case TaskKind::kAdam: {
        if (!pending_) return;
        const UnitSpec& spec = model_.units()[u];
        device_.operators().adam({.shard = shard(task.unit),
                                  .segments = spec.segments.data(),
                                  .segment_count = static_cast<int64_t>(spec.segments.size()),
                                  .constants = constants_},
                                 lane);
        return;
      }
    }
  }

  [[nodiscard]] UnitCall unit_call(const Task& task, gpu::Stream& lane) const {
    const Buffers& b = plan_.buffers;
    const auto m = static_cast<size_t>(task.micro_batch);
    const auto u = static_cast<size_t>(task.unit);
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
            .weight = pointer(task.weight),
            .shared_weight = pointer(task.shared_weight),
            .input = u > 0 ? pointer(b.boundary[u - 1][m]) : nullptr,
            .output = task.kind == TaskKind::kForward ? pointer(b.boundary[u][m]) : nullptr,
            .boundary_gradient = backward ? pointer(b.boundary_gradient[m]) : nullptr,
            .gradient = pointer_as<float>(task.accumulator),
            .accumulate = task.accumulate,
            .shared_gradient = pointer_as<float>(task.shared_accumulator),
            .accumulate_shared = task.accumulate_shared,
            .loss_scale = loss_scale_,
            .loss_sum = pointer_as<double>(b.scalars)};
  }

  [[nodiscard]] cpu_adam::Shard shard(int unit) const {
    const auto& home = plan_.buffers.home[static_cast<size_t>(unit)];
    const auto at = [&](StateKind kind) { return home[static_cast<size_t>(kind)]; };
    auto* residual = pointer_as<uint16_t>(at(StateKind::kResidual));
    auto* moment1 = pointer_as<float>(at(StateKind::kMoment1));
    auto* moment2 = pointer_as<float>(at(StateKind::kMoment2));
    std::byte* weight = pointer(at(StateKind::kWeight));
    return {.count = model_.units()[static_cast<size_t>(unit)].parameter_count,
            .weight_dtype = model_.dtype(),
            .gradient_dtype = model_.dtype(),
            .gradient = pointer(at(StateKind::kGradient)),
            .weight = weight,
            .residual = residual,
            .moment1 = moment1,
            .moment2 = moment2,
            .weight_out = weight,
            .residual_out = residual,
            .moment1_out = moment1,
            .moment2_out = moment2};
  }

  void run_cpu_lane(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (true) {
      const auto& tasks = lane_tasks_[index(Lane::kCpu)];
      changed_.wait(lock, [&] {
        return stop.stop_requested() || (graph_ && !error_ && cpu_next_ < tasks.size() &&
                                         ready_locked(*graph_, tasks[cpu_next_]));
      });
      if (stop.stop_requested()) return;
      const StepGraph& graph = *graph_;
      const TaskId id = tasks[cpu_next_];
      cpu_busy_ = true;
      lock.unlock();
      std::exception_ptr error;
      try {
        run_on_cpu(graph, graph[static_cast<size_t>(id)]);
      } catch (...) {
        error = std::current_exception();
      }
      lock.lock();
      if (error && !error_) error_ = error;
      ended_[static_cast<size_t>(id)] = !error;
      ++cpu_next_;
      cpu_busy_ = false;
      changed_.notify_all();
    }
  }

  void run_on_cpu(const StepGraph& graph, const Task& task) {
    for (const TaskId earlier : task.after) {
      const auto e = static_cast<size_t>(earlier);
      if (graph[e].lane != Lane::kCpu) device_.synchronize(*events_[e]);
    }
    STRATA_CHECK(task.kind == TaskKind::kAdam, "the cpu lane runs the optimizer");
    if (!pending_) return;
    cpu_adam::update(adam_arena_, shard(task.unit),
                     model_.units()[static_cast<size_t>(task.unit)].segments, constants_);
  }

  gpu::Device& device_;
  const UnitModel& model_;
  const Plan plan_;
  tbb::task_arena adam_arena_;
  std::unique_ptr<gpu::Arena> device_arena_, host_arena_;
  std::array<std::unique_ptr<gpu::Stream>, kLanes> streams_;
  std::vector<std::unique_ptr<gpu::Event>> events_;  // [task]
  size_t most_tasks_ = 0;
  std::vector<int64_t> sequences_, max_sequence_;  // [micro-batch]

  float loss_scale_ = 0;
  int64_t logits_row_ = -1;
  bool pending_ = false;
  cpu_adam::StepConstants constants_{};

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  const StepGraph* graph_ = nullptr;  // what is running
  std::array<std::vector<TaskId>, kLanes> lane_tasks_;
  std::vector<bool> issued_;  // device lanes: enqueued
  std::vector<bool> ended_;   // cpu lane: done
  size_t cpu_next_ = 0;
  bool cpu_busy_ = false;
  std::exception_ptr error_;
  std::jthread cpu_lane_;
};

Executor::Executor(gpu::Device& device, const UnitModel& model, Plan plan, int cpu_threads)
    : impl_(std::make_unique<Impl>(device, model, std::move(plan), cpu_threads)) {}
Executor::~Executor() = default;

const Plan& Executor::plan() const noexcept { return impl_->plan(); }
ForwardBackwardResult Executor::forward_backward(std::span<const HostMicroBatch> micro_batches,
                                                 float loss_scale) {
  return impl_->forward_backward(micro_batches, loss_scale);
}
void Executor::set_pending_update(const cpu_adam::StepConstants& constants) {
  impl_->set_pending_update(constants);
}
void Executor::finish_update() { impl_->finish_update(); }
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

}  // namespace strata::pipeline
