#include "libcalib/text/windows.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "libcalib/base/error.h"
#include "libcalib/base/plural.h"

namespace calib::text {
namespace {

std::int64_t available(const FileDocuments& f, bool with_tails) {
  return std::max<std::int64_t>(0, (with_tails ? f.n_documents() : f.n_full()) - f.option.skip);
}

// Tokens that the documents behind `skip` hold, the short tail included.
std::int64_t tokens_available(const FileDocuments& f) {
  std::int64_t n = 0;
  for (std::int64_t i = f.option.skip; i < f.n_documents(); ++i) {
    const auto& [begin, end] = f.documents[static_cast<std::size_t>(i)];
    n += static_cast<std::int64_t>(end - begin) + (f.adds_bos ? 1 : 0);
  }
  return n;
}

[[noreturn]] void fail_infeasible(const std::vector<const FileDocuments*>& files, std::int64_t n, std::int64_t seq_len) {
  std::int64_t tokens = 0, documents = 0;
  bool rows = true;
  for (const FileDocuments* f : files) {
    tokens += tokens_available(*f);
    documents += available(*f, true);
    rows &= f->rows;
  }
  const std::string where = files.size() == 1 ? files[0]->name : "--data";
  if (rows) fail(ErrorKind::kInfeasible, where, "have {}, need {}; lower --num-samples (or num=) or give more data", counted(documents, "document"), n);
  fail(ErrorKind::kInfeasible, where, "have {}, need {} ({} × {}); lower --num-samples (or num=) or --seq-len, or give more text", counted(tokens, "token"),
       n * seq_len, n, seq_len);
}

// Parts of `total` in proportion to `weights`, rounded by largest remainder (ties: the earlier one).
std::vector<std::int64_t> apportion(std::int64_t total, const std::vector<double>& weights) {
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int64_t> parts(weights.size(), 0);
  if (sum <= 0) return parts;
  std::vector<std::pair<double, std::size_t>> remainders;
  std::int64_t given = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const double exact = static_cast<double>(total) * weights[i] / sum;
    parts[i] = static_cast<std::int64_t>(std::floor(exact));
    given += parts[i];
    remainders.emplace_back(exact - std::floor(exact), i);
  }
  std::stable_sort(remainders.begin(), remainders.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
  for (std::size_t i = 0; given < total; ++i, ++given) ++parts[remainders[i % remainders.size()].second];
  return parts;
}

double mean_length(const FileDocuments& f) {
  const std::int64_t n = available(f, true);
  return n > 0 ? static_cast<double>(tokens_available(f)) / static_cast<double>(n) : 1.0;
}

// Weights of the files without `num`: document counts stand to each other as the wished tokens divided by the mean length.
std::vector<double> weights_of(const std::vector<FileDocuments>& files, const std::vector<std::size_t>& open, bool with_tails) {
  double shares = 0, rest_tokens = 0;
  bool all_have_shares = true;
  for (const std::size_t i : open) {
    if (files[i].option.share) shares += *files[i].option.share;
    else rest_tokens += static_cast<double>(tokens_available(files[i])), all_have_shares = false;
  }
  if (shares > 1 + 1e-9) fail(ErrorKind::kUsage, "--data", "the shares add up to {}, more than 1", shares);
  if (shares > 1 - 1e-9 && !all_have_shares) fail(ErrorKind::kUsage, "--data", "the shares add up to 1, which leaves nothing for the files without a share");
  std::vector<double> weights;
  for (const std::size_t i : open) {
    const FileDocuments& f = files[i];
    if (shares == 0) weights.push_back(static_cast<double>(available(f, with_tails)));
    else if (f.option.share) weights.push_back(*f.option.share / mean_length(f));
    else weights.push_back((1 - shares) * static_cast<double>(tokens_available(f)) / rest_tokens / mean_length(f));
  }
  return weights;
}

std::vector<std::int64_t> count_per_file(const std::vector<FileDocuments>& files, const WindowRequest& request) {
  std::vector<std::int64_t> counts(files.size(), 0);
  std::vector<std::size_t> open;
  std::int64_t fixed = 0, full = 0, all = 0;
  bool shares = false;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const FileDocuments& f = files[i];
    if (f.option.num) {
      if (*f.option.num > available(f, false)) fail_infeasible({&f}, *f.option.num, request.seq_len);
      counts[i] = *f.option.num;
      fixed += counts[i];
    } else {
      open.push_back(i);
      full += available(f, false);
      all += available(f, true);
      shares |= f.option.share.has_value();
    }
  }
  if (open.empty()) {
    if (request.num_samples > 0 && request.num_samples != fixed)
      fail(ErrorKind::kUsage, "--num-samples", "is {}, but the num= of the files add up to {}", request.num_samples, fixed);
    return counts;
  }
  const bool asked = request.num_samples > 0;
  if (asked && request.num_samples < fixed) fail(ErrorKind::kUsage, "--num-samples", "is {}, less than the num= of the files ({})", request.num_samples, fixed);
  std::int64_t wanted = (asked ? request.num_samples : request.default_samples) - fixed;
  const bool with_tails = !asked && full < wanted;
  if (wanted <= 0) return counts;
  std::vector<const FileDocuments*> open_files;
  for (const std::size_t i : open) open_files.push_back(&files[i]);
  if (asked && full < wanted) fail_infeasible(open_files, wanted, request.seq_len);
  if (!asked) wanted = std::min(wanted, all);
  const std::vector<double> weights = weights_of(files, open, with_tails);
  // Where the number is free, it shrinks until the shares can be kept; where it is asked for, they must fit.
  std::vector<std::int64_t> parts;
  for (;; --wanted) {
    parts = apportion(wanted, weights);
    std::size_t short_of = open.size();
    for (std::size_t k = 0; k < open.size() && short_of == open.size(); ++k)
      if (parts[k] > available(files[open[k]], with_tails)) short_of = k;
    if (short_of == open.size()) break;
    if (asked && shares) fail_infeasible({&files[open[short_of]]}, parts[short_of], request.seq_len);
    const double scale = static_cast<double>(available(files[open[short_of]], with_tails)) / static_cast<double>(parts[short_of]);
    wanted = std::min(wanted, static_cast<std::int64_t>(std::ceil(static_cast<double>(wanted) * scale)) + 1);
  }
  for (std::size_t k = 0; k < open.size(); ++k) counts[open[k]] = parts[k];
  return counts;
}

}  // namespace

std::int64_t FileDocuments::n_tokens() const {
  std::int64_t n = 0;
  for (const auto& [begin, end] : documents) n += static_cast<std::int64_t>(end - begin) + (adds_bos ? 1 : 0);
  return n;
}

std::int64_t cut_windows(std::size_t begin, std::size_t end, std::int64_t seq_len, FileDocuments& file) {
  const std::size_t payload = static_cast<std::size_t>(seq_len - (file.adds_bos ? 1 : 0));
  CALIB_CHECK(payload > 0);
  for (std::size_t at = begin; at < end; at += payload) {
    const std::size_t size = std::min(payload, end - at);
    const bool alone = at == begin;
    if (!alone && size + (file.adds_bos ? 1 : 0) < 2) return static_cast<std::int64_t>(size);
    file.documents.emplace_back(at, at + size);
    file.short_tail = !file.rows && size < payload;
  }
  return 0;
}

std::vector<std::vector<std::int64_t>> choose_windows(const std::vector<FileDocuments>& files, const WindowRequest& request) {
  for (const FileDocuments& f : files)
    if (f.option.skip >= f.n_documents())
      fail(ErrorKind::kInfeasible, f.name, "skip={} passes over all of it: {}", f.option.skip, counted(f.n_documents(), "document"));
  const std::vector<std::int64_t> counts = count_per_file(files, request);
  std::vector<std::vector<std::int64_t>> chosen(files.size());
  for (std::size_t i = 0; i < files.size(); ++i) {
    const bool whole = counts[i] > available(files[i], false);
    const std::int64_t pool = available(files[i], whole);
    CALIB_CHECK(counts[i] <= pool);
    for (std::int64_t k = 0; k < counts[i]; ++k)
      chosen[i].push_back(files[i].option.skip + (request.first ? k : k * pool / counts[i]));
  }
  return chosen;
}

}  // namespace calib::text
