#pragma once
// Strict JSON reading for files that come from outside (config, index, tokenizer, safetensors header, plan).

#include <cstdint>
#include <string>
#include <string_view>

#include <nlohmann/json_fwd.hpp>

namespace calib {

/// Parses one JSON document. Stricter than the library's default: duplicate keys, nesting deeper than 128, invalid
/// UTF-8, numbers that overflow to infinity and trailing text are errors (kFormat naming `where`, line, column, byte and the text there).
/// Locale-independent.
nlohmann::json parse_json_strict(std::string_view text, const std::string& where);

/// First bytes of a file that is not what its name says: "Git LFS pointer (real object is N bytes)", "HTML page",
/// "zip archive", "gzip", "ELF", "HDF5", "GGUF", "safetensors", "old GGML format"; empty if none of these.
std::string describe_foreign_content(std::string_view first_bytes);

}  // namespace calib
