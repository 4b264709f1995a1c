#include <algorithm>
#include <cctype>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "libcalib/base/json.h"
#include "libcalib/weights/opened_files.h"
#include "libcalib/weights/safetensors.h"

namespace calib::weights {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";

// A dangling link counts as there: opening it then says where it points.
bool is_there(const std::string& path) {
  std::error_code ignored;
  return fs::symlink_status(path, ignored).type() != fs::file_type::not_found;
}

std::vector<std::string> files_ending_in(const std::string& folder, const std::string& tail) {
  std::vector<std::string> out;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name.size() > tail.size() && name.compare(name.size() - tail.size(), tail.size(), tail) == 0) out.push_back(name);
  }
  if (error) fail(ErrorKind::kIo, folder, "folder cannot be read: {}", error.message());
  std::sort(out.begin(), out.end());
  return out;
}

// The name as written decides, not where links lead: the download cache of the Hub is made of links that leave the folder.
bool stays_inside(const std::string& name) {
  if (name.empty() || name.find('\0') != std::string::npos || name.find('\\') != std::string::npos) return false;
  if (name.size() > 1 && name[1] == ':' && std::isalpha(static_cast<unsigned char>(name[0]))) return false;
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string part = name.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return true;
}

[[noreturn]] void fail_all(ErrorKind kind, const std::string& where, const char* what, std::vector<std::string> problems) {
  if (problems.size() == 1) fail(kind, where, "{}", problems[0]);
  throw Error(kind, where, fmt::format("{} {}", problems.size(), what), std::move(problems));
}

std::map<std::string, std::string> read_index(const std::string& path) {
  const MappedFile file(path);
  const Json index = parse_json_strict(file.bytes(), path);
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    fail(ErrorKind::kFormat, path, "expected an object with the object weight_map (tensor name -> file name)");
  std::map<std::string, std::string> shard_of;
  std::vector<std::string> problems;
  for (const auto& item : index["weight_map"].items()) {
    if (!item.value().is_string() || !stays_inside(item.value().get<std::string>()))
      problems.push_back(fmt::format("weight_map/{}: {} is not the name of a file inside the folder", item.key(), item.value().dump()));
    else
      shard_of[item.key()] = item.value().get<std::string>();
  }
  if (!problems.empty()) fail_all(ErrorKind::kFormat, path, "faulty file names in weight_map", std::move(problems));
  if (shard_of.empty()) fail(ErrorKind::kFormat, path, "weight_map lists no tensor");
  return shard_of;
}

void add_file(OpenedFiles& out, const std::string& path) {
  MappedFile file(path);
  SafetensorsFile parsed = parse_safetensors(file);
  out.header_bytes.push_back(parsed.data_offset);
  out.files.push_back(std::move(file));
  std::move(parsed.tensors.begin(), parsed.tensors.end(), std::back_inserter(out.tensors));
}

void check_shards_there(const std::string& folder, const std::set<std::string>& shards) {
  std::vector<std::string> missing;
  for (const std::string& s : shards)
    if (!is_there(folder + "/" + s)) missing.push_back(s);
  if (missing.size() == 1) fail(ErrorKind::kNotFound, folder + "/" + missing[0], "file not found; {} lists it", kIndex);
  if (!missing.empty())
    throw Error(ErrorKind::kNotFound, folder, fmt::format("{} of {} shards that {} lists not found", missing.size(), shards.size(), kIndex), missing);
}

// Index against shards, both ways. A tensor in two shards, in another shard, or in one side only is a mismatch.
void reconcile(const std::string& folder, const std::map<std::string, std::string>& shard_of, const OpenedFiles& opened) {
  std::map<std::string, std::vector<std::string>> found_in;
  for (const TensorInfo& t : opened.tensors) found_in[t.name].push_back(t.file.substr(folder.size() + 1));
  std::vector<std::string> problems;
  for (const auto& [name, shard] : shard_of)
    if (found_in.count(name) == 0) problems.push_back(fmt::format("tensor {} is not in {}, where {} puts it", name, shard, kIndex));
  for (const auto& [name, shards] : found_in) {
    const auto listed = shard_of.find(name);
    if (shards.size() > 1)
      problems.push_back(fmt::format("tensor {} is in {} files: {}", name, shards.size(), fmt::join(shards, ", ")));
    else if (listed == shard_of.end())
      problems.push_back(fmt::format("tensor {} of {} is not listed in {}", name, shards[0], kIndex));
    else if (listed->second != shards[0])
      problems.push_back(fmt::format("tensor {} is in {}, but {} puts it in {}", name, shards[0], kIndex, listed->second));
  }
  if (!problems.empty()) fail_all(ErrorKind::kMismatch, folder, "disagreements between the index and the shards", std::move(problems));
}

void note_unread(const std::string& folder, const std::set<std::string>& read, const LogSink& log) {
  std::vector<std::string> unread = files_ending_in(folder, ".safetensors");
  std::erase_if(unread, [&](const std::string& name) { return read.count(name) != 0; });
  if (!unread.empty())
    log.note(fmt::format("{}: {} safetensors file(s) that are not part of the model are not read: {}", folder, unread.size(), fmt::join(unread, ", ")));
}

}  // namespace

OpenedFiles open_hf_folder(const std::string& folder, const LogSink& log) {
  OpenedFiles out;
  out.folder = folder;
  const bool single = is_there(folder + "/" + kSingle), index = is_there(folder + "/" + kIndex);
  std::set<std::string> names;
  if (single) {
    if (index) log.warning(fmt::format("{}: both {} and {} are there; the first is read", folder, kSingle, kIndex));
    names.insert(kSingle);
    add_file(out, folder + "/" + kSingle);
  } else if (index) {
    const auto shard_of = read_index(folder + "/" + kIndex);
    for (const auto& entry : shard_of) names.insert(entry.second);
    check_shards_there(folder, names);
    for (const std::string& name : names) add_file(out, folder + "/" + name);
    reconcile(folder, shard_of, out);
  } else {
    const auto others = files_ending_in(folder, ".safetensors");
    if (others.size() > 1)
      fail(ErrorKind::kNotFound, folder + "/" + kIndex, "file not found; it must say which of the {} safetensors files are the model", others.size());
    if (others.empty() && !files_ending_in(folder, ".bin").empty())
      fail(ErrorKind::kUnsupported, folder, "weights only as .bin (PyTorch pickle): convert them to safetensors");
    if (others.empty()) fail(ErrorKind::kNotFound, folder + "/" + kSingle, "file not found, and neither is {}", kIndex);
    log.note(fmt::format("{}: weights are read from {}", folder, others[0]));
    names.insert(others[0]);
    add_file(out, folder + "/" + others[0]);
  }
  note_unread(folder, names, log);
  return out;
}

}  // namespace calib::weights
