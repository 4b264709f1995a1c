#pragma once
// One value of --data: a path with options behind its last colon.

#include <cstdint>
#include <optional>
#include <string>

namespace calib::text {

struct DataOption {
  std::string path;              ///< "-" = standard input
  std::string options;           ///< as written, without the colon
  std::optional<double> share;   ///< of all tokens taken, in (0, 1]
  std::optional<std::int64_t> num;  ///< documents taken from this file, >= 1
  std::int64_t skip = 0;         ///< documents passed over at its start
};

/// Splits F[:share=0.3,num=64,skip=10]. What follows the last colon counts as options only if it is a list of key=value
/// with these keys; any other colon belongs to the path. Throws: kUsage for a value out of range or a key given twice.
DataOption parse_data_option(const std::string& value);

}  // namespace calib::text
