#include "comm/control.h"

#include <fmt/format.h>

#include <cstring>

namespace strata::comm {
namespace {

/// A rank that waits for others is not to blame.
class Waiting {
 public:
  explicit Waiting(Watcher& watcher) : watcher_(watcher) { watcher_.set_waiting(true); }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;
  ~Waiting() { watcher_.set_waiting(false); }

 private:
  Watcher& watcher_;
};

std::vector<std::byte> copy_of(std::span<const std::byte> data) {
  return {data.begin(), data.end()};
}

}  // namespace

Control::Control(ControlListener listener, const ControlOptions& options)
    : rank_(0), watcher_(gather_ranks(listener, options), options) {
  STRATA_CHECK(options.rank == 0, "only rank 0 listens");
}

Control::Control(const ControlOptions& options) : rank_(0), watcher_(alone(options), options) {
  STRATA_CHECK(options.rank == 0 && options.ranks == 1, "one rank is alone");
}

Control::Control(const std::string& address, int port, const ControlOptions& options)
    : rank_(options.rank), watcher_(join_ranks(address, port, options), options) {
  STRATA_CHECK(options.rank > 0 && options.rank < options.ranks, "no rank of this run");
}

std::unique_ptr<Control> Control::start(const RankInfo& info, ControlOptions options) {
  options.rank = info.rank;
  options.ranks = info.ranks;
  options.local_rank = info.local_rank;
  options.host = info.host;
  if (info.ranks == 1) return std::make_unique<Control>(options);
  STRATA_CHECK(info.master_addr && info.master_port, "an address to meet at");
  if (info.rank == 0) {
    return std::make_unique<Control>(ControlListener(*info.master_addr, *info.master_port),
                                     options);
  }
  return std::make_unique<Control>(*info.master_addr, *info.master_port, options);
}

std::vector<std::vector<std::byte>> Control::all_gather(std::span<const std::byte> data) {
  return gather(data, Kind::kAllGather, 0);
}

std::vector<int64_t> Control::all_gather(int64_t value) {
  std::vector<int64_t> values;
  for (const auto& part : all_gather(std::as_bytes(std::span(&value, 1)))) {
    STRATA_CHECK(part.size() == sizeof value, "all ranks gather a number");
    std::memcpy(&values.emplace_back(), part.data(), sizeof value);
  }
  return values;
}

std::vector<std::byte> Control::broadcast(std::span<const std::byte> data, int root) {
  STRATA_CHECK(root >= 0 && root < ranks(), "the root is a rank");
  if (rank_ != root) data = {};
  return gather(data, Kind::kBroadcast, root)[static_cast<size_t>(root)];
}

void Control::barrier() { static_cast<void>(gather({}, Kind::kBarrier, 0)); }

std::vector<std::vector<std::byte>> Control::gather(std::span<const std::byte> data, Kind kind,
                                                    int root) {
  const Waiting waiting(watcher_);
  if (rank_ == 0) return gather_as_zero(data, kind, root);
  watcher_.send(0, MessageType::kCollect,
                Packer().number(static_cast<int64_t>(kind)).number(root).bytes(data).take());
  const Message result = watcher_.get(0);
  Unpacker from(result.body);
  std::vector<std::vector<std::byte>> parts;
  for (int r = 0; r < ranks(); ++r) parts.push_back(copy_of(from.bytes()));
  return parts;
}

std::vector<std::vector<std::byte>> Control::gather_as_zero(std::span<const std::byte> data,
                                                            Kind kind, int root) {
  std::vector<std::vector<std::byte>> parts{copy_of(data)};
  const auto peers = static_cast<size_t>(ranks() - 1);
  for (size_t peer = 0; peer < peers; ++peer) {
    const Message message = watcher_.get(peer);
    if (message.type != MessageType::kCollect) end_at_odds(peer);
    Unpacker from(message.body);
    if (from.number() != static_cast<int64_t>(kind) || from.number() != root) end_at_odds(peer);
    parts.push_back(copy_of(from.bytes()));
  }
  Packer packer;
  for (const auto& part : parts) packer.bytes(part);
  const SharedBody body = packer.take();
  for (size_t peer = 0; peer < peers; ++peer) watcher_.send(peer, MessageType::kResult, body);
  return parts;
}

void Control::end_at_odds(size_t peer) {
  const Verdict verdict =
      fail(fmt::format("rank {} is at another collective than rank 0", peer + 1));
  throw RankFailure(verdict.message, verdict.should_print);
}

void Control::close() {
  const Waiting waiting(watcher_);
  const auto peers = rank_ == 0 ? static_cast<size_t>(ranks() - 1) : size_t{1};
  if (rank_ != 0) watcher_.send(0, MessageType::kGoodbye, nullptr);
  for (size_t peer = 0; peer < peers; ++peer) {
    if (watcher_.get(peer).type != MessageType::kGoodbye) end_at_odds(peer);
  }
  if (rank_ == 0) {
    for (size_t peer = 0; peer < peers; ++peer) {
      watcher_.send(peer, MessageType::kGoodbye, nullptr);
    }
  }
  watcher_.close();
}

}  // namespace strata::comm
