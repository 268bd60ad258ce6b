#include <fmt/format.h>
#include <mpi.h>

#include <algorithm>
#include <array>

#include "base/bytes.h"
#include "base/error.h"
#include "comm/mpi_internal.h"

namespace strata::comm {
namespace {

class World final : public MpiWorld {
 public:
  World() : session_(std::make_shared<MpiSession>()) {
    check_mpi(MPI_Comm_rank(MPI_COMM_WORLD, &rank_), "ask MPI for this rank");
    check_mpi(MPI_Comm_size(MPI_COMM_WORLD, &size_), "ask MPI how many ranks there are");
    std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
    int length = 0;
    check_mpi(MPI_Get_processor_name(name.data(), &length), "ask MPI for the host's name");
    host_name_.assign(name.data(), static_cast<size_t>(length));
    MPI_Comm of_host = MPI_COMM_NULL;
    check_mpi(
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &of_host),
        "find the ranks of this host");
    check_mpi(MPI_Comm_rank(of_host, &local_rank_), "ask MPI for this rank");
    check_mpi(MPI_Comm_free(&of_host), "free a communicator");
  }

  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  [[nodiscard]] int local_rank() const noexcept override { return local_rank_; }
  [[nodiscard]] const std::string& host_name() const noexcept override { return host_name_; }

  void broadcast(void* data, size_t size_bytes, int root) override {
    STRATA_CHECK(root >= 0 && root < size_, "the root is a rank of the group");
    for (size_t done = 0; done < size_bytes;) {
      const size_t piece = std::min(size_bytes - done, size_t{64} * kMiB);
      check_mpi(MPI_Bcast(static_cast<std::byte*>(data) + done, static_cast<int>(piece), MPI_BYTE,
                          root, MPI_COMM_WORLD),
                "broadcast");
      done += piece;
    }
  }

  [[nodiscard]] std::unique_ptr<Communicator> split(int color, int key) override {
    STRATA_CHECK(color >= 0, "a rank is in some group");
    return create_mpi_communicator(session_, color, key);
  }

 private:
  std::shared_ptr<MpiSession> session_;
  int rank_ = 0;
  int size_ = 1;
  int local_rank_ = 0;
  std::string host_name_;
};

}  // namespace

bool mpi_is_built() noexcept { return true; }

MpiSession::MpiSession() {
  int begun = 0;
  check_mpi(MPI_Initialized(&begun), "ask whether MPI has been started");
  if (begun != 0) throw failure("cannot start MPI: this process has done so before");
  int provided = MPI_THREAD_SINGLE;
  check_mpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided), "start MPI");
  if (provided < MPI_THREAD_MULTIPLE) {
    static_cast<void>(MPI_Finalize());
    throw failure(
        "this MPI does not allow calls of several threads (MPI_THREAD_MULTIPLE); use one that "
        "does, such as Open MPI");
  }
  check_mpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
            "tell MPI to return errors");
}

MpiSession::~MpiSession() {
  if (!left()) static_cast<void>(MPI_Finalize());
}

void check_mpi(int code, std::string_view what) {
  if (code == MPI_SUCCESS) return;
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  if (MPI_Error_string(code, text.data(), &length) != MPI_SUCCESS) length = 0;
  throw failure(fmt::format("cannot {}: {}", what,
                            length > 0
                                ? std::string(text.data(), static_cast<size_t>(length))
                                : fmt::format("MPI's error {}, for which it has no words", code)));
}

RankGroups MpiWorld::create_rank_groups(int shard_ranks) {
  STRATA_CHECK(shard_ranks > 0 && size() % shard_ranks == 0, "shard groups are of one size");
  RankGroups groups;
  groups.world = split(0, rank());
  groups.shard = split(rank() / shard_ranks, rank());
  groups.replica = split(rank() % shard_ranks, rank());
  return groups;
}

std::unique_ptr<MpiWorld> start_mpi() { return std::make_unique<World>(); }

}  // namespace strata::comm
