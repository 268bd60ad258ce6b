#include "train/rank_exchange.h"

#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>
#include <string_view>

namespace strata::train {
namespace {

constexpr char kMade = '+';
constexpr char kFailed = '-';

bool has_failed(const std::vector<std::byte>& answer) {
  return answer.empty() || static_cast<char>(answer.front()) != kMade;
}

std::string text_of(const std::vector<std::byte>& answer) {
  return {reinterpret_cast<const char*>(answer.data()) + 1, answer.size() - 1};
}

}  // namespace

std::string RankExchange::describe_rank(int rank) const { return fmt::format("rank {}", rank); }

std::vector<std::string> RankExchange::gather_agreed(const std::function<std::string()>& work) {
  if (ranks() == 1) return {work()};
  std::string mine;
  const auto failed = [&](ErrorKind kind, std::string_view what) {
    mine = kFailed + nlohmann::json{{"kind", static_cast<int>(kind)}, {"what", what}}.dump(
                         -1, ' ', false, nlohmann::json::error_handler_t::replace);
  };
  try {
    mine = kMade + work();
  } catch (const Error& error) {
    failed(error.kind(), error.what());
  } catch (const std::exception& error) {
    failed(ErrorKind::kFailed, error.what());
  }
  const std::vector<std::vector<std::byte>> all = all_gather(std::as_bytes(std::span(mine)));
  const auto first = std::find_if(all.begin(), all.end(), has_failed);
  if (first == all.end()) {
    std::vector<std::string> made;
    made.reserve(all.size());
    for (const auto& answer : all) made.push_back(text_of(answer));
    return made;
  }
  const nlohmann::json error = nlohmann::json::parse(text_of(*first));
  auto what = error["what"].get<std::string>();
  // What is wrong on all ranks is nobody's in particular.
  if (!std::all_of(all.begin(), all.end(), has_failed)) {
    what = fmt::format("{}: {}", describe_rank(static_cast<int>(first - all.begin())), what);
  }
  throw AgreedError(static_cast<ErrorKind>(error["kind"].get<int>()), what);
}

void RankExchange::agree(const std::function<void()>& work) {
  gather_agreed([&] {
    work();
    return std::string();
  });
}

}  // namespace strata::train
