// Opening the file under a backend: past the page cache where that can be had.
#pragma once

#include "base/file.h"
#include "nvme/backend.h"

namespace strata::nvme {

struct OpenedFile {
  UniqueFd fd;
  BackendInfo info;  // all but the name
};

/// Opens an existing file or block device. Throws IoError.
[[nodiscard]] OpenedFile open_file(const BackendOptions& options);

}  // namespace strata::nvme
