#include "pipeline/unit_model.h"

namespace strata::pipeline {

std::string_view name_of(SavedActivations saved) noexcept {
  switch (saved) {
    case SavedActivations::kNone:
      return "none";
    case SavedActivations::kAttention:
      return "attention";
    case SavedActivations::kAll:
      return "all";
  }
  return "?";
}

}  // namespace strata::pipeline
