#include "libcalib/weights/checkpoint.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include <fmt/ranges.h>

#include "libcalib/base/json.h"
#include "libcalib/base/mapped_file.h"
#include "libcalib/base/sha256.h"
#include "libcalib/weights/gguf_dequant.h"
#include "libcalib/weights/opened_files.h"

namespace calib::weights {

struct Checkpoint::Impl {
  std::string path;
  OpenedFiles opened;
  std::map<std::string, std::size_t> file_of_path;

  const MappedFile& file(const TensorInfo& t) const {
    const auto it = file_of_path.find(t.file);
    CALIB_CHECK(it != file_of_path.end());
    return opened.files[it->second];
  }
  const TensorInfo* find(const std::string& name) const {
    const auto& all = opened.tensors;
    const auto it = std::lower_bound(all.begin(), all.end(), name, [](const TensorInfo& t, const std::string& n) { return t.name < n; });
    return it != all.end() && it->name == name ? &*it : nullptr;
  }
};

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kStep = std::size_t{4} << 20;  // bytes between two looks at the file's length, and hashed at once

// A GGUF file inside a folder; the parts of one split model count as one.
std::string gguf_in_folder(const std::string& folder) {
  std::set<std::string> models;
  std::string first;
  std::error_code error;
  std::vector<std::string> names;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error))
    if (it->path().extension() == ".gguf") names.push_back(it->path().filename().string());
  if (error) fail(ErrorKind::kIo, folder, "folder cannot be read: {}", error.message());
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) {
    const SplitName split = parse_split_name(name);
    models.insert(split.count != 0 ? fmt::format("{}-of-{}", split.base, split.count) : name);
  }
  if (models.size() > 1) throw Error(ErrorKind::kUsage, folder, fmt::format("holds {} GGUF models: name one of the files", models.size()), names);
  return names.empty() ? std::string() : folder + "/" + names.front();
}

OpenedFiles open_folder(const std::string& folder, const LogSink& log) {
  std::error_code ignored;
  const bool has_config = fs::symlink_status(folder + "/config.json", ignored).type() != fs::file_type::not_found;
  const bool has_weights = fs::symlink_status(folder + "/model.safetensors", ignored).type() != fs::file_type::not_found ||
                           fs::symlink_status(folder + "/model.safetensors.index.json", ignored).type() != fs::file_type::not_found;
  if (!has_config || !has_weights) {
    const std::string gguf = gguf_in_folder(folder);
    if (!gguf.empty()) return open_gguf(gguf);
  }
  if (!has_config)
    fail(ErrorKind::kFormat, folder, "a folder without config.json and without a .gguf file: expected a Hugging Face model folder or a GGUF file");
  return open_hf_folder(folder, log);
}

OpenedFiles open_file(const std::string& path) {
  require_file(path, "expected a Hugging Face model folder or a GGUF file");
  std::string head;
  {
    const MappedFile file(path);
    head = describe_foreign_content(file.bytes().substr(0, 512));
  }
  if (head.rfind("safetensors", 0) == 0 || (head.empty() && fs::path(path).extension() == ".safetensors"))
    fail(ErrorKind::kFormat, path, "a safetensors file: pass the folder that holds it together with config.json and tokenizer.json");
  return open_gguf(path);
}

// Scales, zero points and the like that make sense of the stored numbers of another tensor.
const TensorInfo* companion(const Checkpoint& checkpoint, const std::string& name) {
  const std::string tail = ".weight";
  if (name.size() <= tail.size() || name.compare(name.size() - tail.size(), tail.size(), tail) != 0) return nullptr;
  const std::string base = name.substr(0, name.size() - tail.size());
  for (const char* suffix : {".weight_scale", ".weight_scale_inv", ".weight_zero_point", ".weight.absmax", ".scales", ".SCB"})
    if (const TensorInfo* t = checkpoint.find(base + suffix)) return t;
  return nullptr;
}

void check_readable(const Checkpoint& checkpoint, const TensorInfo& t) {
  const bool whole = t.type == TensorType::kI8 || t.type == TensorType::kU8 || t.type == TensorType::kI16 || t.type == TensorType::kI32;
  const TensorInfo* scale = companion(checkpoint, t.name);
  if (dequantizes(t.type) && !(whole && scale != nullptr)) return;
  if (scale != nullptr)
    fail(ErrorKind::kUnsupported, t.file, "tensor {} has type {} with scales in {}: scaled weights are not read; convert them to BF16 first", t.name,
         t.type_name, scale->name);
  if (t.type == TensorType::kF8E4M3 && t.name.size() > 7 && t.name.compare(t.name.size() - 7, 7, ".weight") == 0)
    fail(ErrorKind::kMismatch, t.file, "tensor {} has type {}, but {}_scale, without which its values mean nothing, is not there", t.name, t.type_name, t.name);
  fail(ErrorKind::kUnsupported, t.file, "tensor {} has type {}, which is not read; convert the model to a type that is (F32, F16, BF16, Q8_0, Q4_K, …)",
       t.name, t.type_name);
}

void check_finite(const TensorInfo& t, std::int64_t first, std::span<const float> values) {
  bool finite = true;
  for (float v : values) finite &= std::isfinite(v);
  if (finite) return;
  const auto at = std::find_if(values.begin(), values.end(), [](float v) { return !std::isfinite(v); });
  fail(ErrorKind::kNumeric, t.file, "tensor {} ({} [{}]): element {} is {} as fp32", t.name, t.type_name, fmt::join(t.shape, ", "),
       first + (at - values.begin()), *at);
}

// Elements [first, first + out.size()), a whole number of blocks.
void read_range(const MappedFile& file, const TensorInfo& t, std::int64_t first, std::span<float> out) {
  const BlockLayout block = block_layout(t.type);
  const auto n = static_cast<std::int64_t>(out.size());
  CALIB_CHECK(first >= 0 && n <= t.n_elements && first <= t.n_elements - n);
  CALIB_CHECK(first % block.elements == 0 && n % block.elements == 0);
  const char* data = file.bytes().data() + t.offset;
  const std::int64_t step = std::max<std::int64_t>(1, static_cast<std::int64_t>(kStep) / block.bytes) * block.elements;
  for (std::int64_t i = 0; i < n; i += step) {
    file.check_not_shrunk();  // a page past the end of a shortened file would raise SIGBUS
    const std::int64_t count = std::min(step, n - i);
    const auto part = out.subspan(static_cast<std::size_t>(i), static_cast<std::size_t>(count));
    dequantize(t.type, data + (first + i) / block.elements * block.bytes, count, part.data());
    check_finite(t, first + i, part);
  }
}

std::string content_sha256(const MappedFile& file, const TensorInfo& t) {
  Sha256 hash;
  for (std::size_t at = 0; at < t.size_bytes; at += kStep) {
    file.check_not_shrunk();
    const std::size_t n = std::min(kStep, t.size_bytes - at);
    hash.update(file.bytes().substr(t.offset + at, n));
    file.release(t.offset + at, n);
  }
  return hash.hex();
}

}  // namespace

Checkpoint Checkpoint::open(const std::string& path, const LogSink& log) {
  auto impl = std::make_unique<Impl>();
  impl->path = path;
  std::error_code ignored;
  std::string trimmed = path;
  while (trimmed.size() > 1 && trimmed.back() == '/') trimmed.pop_back();
  impl->opened = fs::is_directory(path, ignored) ? open_folder(trimmed, log) : open_file(path);
  auto& opened = impl->opened;
  std::sort(opened.tensors.begin(), opened.tensors.end(), [](const TensorInfo& a, const TensorInfo& b) { return a.name < b.name; });
  for (std::size_t i = 0; i < opened.files.size(); ++i) impl->file_of_path[opened.files[i].path()] = i;
  return Checkpoint(std::move(impl));
}

Checkpoint::Checkpoint(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Checkpoint::~Checkpoint() = default;
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;

ContainerKind Checkpoint::kind() const noexcept { return impl_->opened.metadata ? ContainerKind::kGguf : ContainerKind::kSafetensors; }
const std::string& Checkpoint::path() const noexcept { return impl_->path; }
const std::string& Checkpoint::folder() const noexcept { return impl_->opened.folder; }
const GgufMetadata& Checkpoint::gguf() const {
  CALIB_CHECK(impl_->opened.metadata.has_value());
  return *impl_->opened.metadata;
}
const std::vector<TensorInfo>& Checkpoint::tensors() const noexcept { return impl_->opened.tensors; }
const TensorInfo* Checkpoint::find(const std::string& name) const noexcept { return impl_->find(name); }

void Checkpoint::read_f32(const TensorInfo& t, std::span<float> out) const {
  CALIB_CHECK(static_cast<std::int64_t>(out.size()) == t.n_elements);
  check_readable(*this, t);
  read_range(impl_->file(t), t, 0, out);
}

void Checkpoint::read_rows_f32(const TensorInfo& t, std::int64_t first_row, std::int64_t n_rows, std::span<float> out) const {
  CALIB_CHECK(!t.shape.empty() && first_row >= 0 && n_rows >= 0 && n_rows <= t.shape[0] && first_row <= t.shape[0] - n_rows);
  const std::int64_t row = t.shape[0] == 0 ? 0 : t.n_elements / t.shape[0];
  CALIB_CHECK(static_cast<std::int64_t>(out.size()) == n_rows * row);
  check_readable(*this, t);
  read_range(impl_->file(t), t, first_row * row, out);
}

void Checkpoint::release(const TensorInfo& t) const noexcept {
  const auto it = impl_->file_of_path.find(t.file);
  if (it != impl_->file_of_path.end()) impl_->opened.files[it->second].release(t.offset, t.size_bytes);
}

std::string Checkpoint::identity_sha256(bool fast) const {
  Sha256 hash;
  if (fast) {
    // Sorted, so that the order in which files were opened does not count.
    std::vector<std::string> lines;
    for (std::size_t i = 0; i < impl_->opened.files.size(); ++i) {
      const MappedFile& file = impl_->opened.files[i];
      lines.push_back(fmt::format("{} {}\n", file.size(), sha256_hex(file.bytes().substr(0, impl_->opened.header_bytes[i]))));
    }
    std::sort(lines.begin(), lines.end());
    for (const auto& line : lines) hash.update(line);
    return hash.hex();
  }
  for (const TensorInfo& t : impl_->opened.tensors)
    hash.update(fmt::format("{}:{} {} [{}] {}\n", t.name.size(), t.name, t.type_name, fmt::join(t.shape, ","), content_sha256(impl_->file(t), t)));
  return hash.hex();
}

}  // namespace calib::weights
