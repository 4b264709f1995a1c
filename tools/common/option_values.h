#pragma once
// Typed options with their range checks and messages; values are parsed without regard to the locale.

#include <cstdint>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}

namespace calib::tools {

/// Whole number in [low, high]. Throws kUsage naming option, value and range.
std::int64_t parse_integer(const std::string& option, const std::string& text, std::int64_t low, std::int64_t high);
/// Finite number in [low, high].
double parse_number(const std::string& option, const std::string& text, double low, double high);
/// Bytes with an optional unit: 512, 64K, 1.5GiB, 2GB (K, M, G, T and KiB … are powers of 1024; KB … of 1000).
std::int64_t parse_bytes(const std::string& option, const std::string& text);
/// "1.5 GiB".
std::string format_bytes(double bytes);
/// "1h02m", "3m05s", "12s".
std::string format_duration(double seconds);

/// "a,b,c"; empty for "". Throws kUsage naming option and text if an item is empty.
std::vector<std::string> split_list(const std::string& option, const std::string& text);
/// The same for an option that may be given several times: all items in order. "" is none, as --print-config writes it.
std::vector<std::string> split_lists(const std::string& option, const std::vector<std::string>& texts);
/// "0,3,5-8": layer numbers, ascending. Throws kUsage naming option and item, also for a layer that is named twice.
std::vector<int> parse_layers(const std::string& option, const std::vector<std::string>& items);

/// Each adds one option that writes `value` and prints its present value as the default. `names` as in "-o,--output".
CLI::Option* add_integer(CLI::App& app, const std::string& names, std::int64_t& value, std::int64_t low, std::int64_t high,
                         const std::string& help, const std::string& group);
CLI::Option* add_number(CLI::App& app, const std::string& names, double& value, double low, double high, const std::string& help,
                        const std::string& group);
CLI::Option* add_bytes(CLI::App& app, const std::string& names, std::int64_t& value, const std::string& help,
                       const std::string& group);
CLI::Option* add_text(CLI::App& app, const std::string& names, std::string& value, const std::string& help,
                      const std::string& group, const std::string& type_name = "TEXT");
CLI::Option* add_flag(CLI::App& app, const std::string& names, bool& value, const std::string& help, const std::string& group);

/// A list that is split by split_lists(): given several times, or with commas.
CLI::Option* add_list(CLI::App& app, const std::string& names, std::vector<std::string>& values, const std::string& help, const std::string& group,
                      const std::string& type_name);

enum class OutputFormat { kHdf5, kJson };
/// What a program writes, and what of the same name it may replace.
struct OutputKind {
  OutputFormat format;
  const char* schema;  ///< "kvcalib.plan"
};
inline constexpr OutputKind kStatsOutput{OutputFormat::kHdf5, "kvcalib.stats"}, kSensOutput{OutputFormat::kHdf5, "kvcalib.sens"};
inline constexpr OutputKind kPlanOutput{OutputFormat::kJson, "kvcalib.plan"}, kEvalOutput{OutputFormat::kJson, "kvcalib.eval"},
    kSaliencyOutput{OutputFormat::kJson, "kvcalib.saliency"};

/// `--output` that cannot be written, that would replace one of `inputs` (files, model folders; empty names are passed over), or that
/// would replace a file of another kind (an empty one is nobody's), is found before the work begins, not after. Leaves nothing behind.
/// Throws: kUsage (empty, a folder, an input, a file of another kind), kNotFound (its folder does not exist), kIo (no right to write, locked).
void check_output(const std::string& output, const std::vector<std::string>& inputs, OutputKind kind);

}  // namespace calib::tools
