#include "libcalib/text/corpus.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <unordered_map>

#include "libcalib/base/plural.h"
#include "libcalib/base/sha256.h"
#include "libcalib/text/chat_template.h"
#include "libcalib/text/ids_reader.h"
#include "libcalib/text/jsonl_reader.h"
#include "libcalib/text/source_text.h"
#include "libcalib/text/windows.h"

namespace calib::text {
namespace {

enum class FileKind { kText, kRows, kIds };

FileKind kind_of(const std::string& path) {
  if (path == "-") return FileKind::kText;
  std::string extension = std::filesystem::path(path).extension().string();
  for (char& c : extension) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  if (extension == ".jsonl" || extension == ".json") return FileKind::kRows;
  return extension == ".ids" ? FileKind::kIds : FileKind::kText;
}

class CorpusReader {
 public:
  CorpusReader(const CorpusRequest& request, const Tokenizer& tokenizer, const LogSink& log) : request_(request), tokenizer_(tokenizer), log_(log) {
    if (!request.chat_template.empty()) template_.emplace(request.chat_template, tokenizer);
    if (tokenizer.adds_bos()) bos_text_ = tokenizer.piece(*tokenizer.bos());
  }

  FileDocuments read(const DataOption& option) {
    const SourceText source(option.path, log_);
    FileDocuments file;
    file.option = option;
    file.name = source.name();
    file.sha256 = source.sha256();
    file.adds_bos = tokenizer_.adds_bos();
    const FileKind kind = kind_of(option.path);
    file.rows = kind != FileKind::kText;
    n_bos_texts_ = 0, n_cut_off_ = 0, n_empty_ = 0;
    if (kind == FileKind::kIds) read_ids(source, file);
    else if (kind == FileKind::kRows) read_rows(source, file);
    else if (has_usable_text(source.text())) read_text(source, file);
    if (file.documents.empty()) fail(ErrorKind::kFormat, file.name, "no usable text: it is empty or blank");
    report(file);
    return file;
  }

 private:
  void add_text(std::string_view text, FileDocuments& file) {
    if (!bos_text_.empty() && text.starts_with(bos_text_)) {
      text.remove_prefix(bos_text_.size());
      ++n_bos_texts_;
    }
    append(tokenizer_.encode(text, false), file);
  }

  void read_text(const SourceText& source, FileDocuments& file) {
    try {
      add_text(source.text(), file);
    } catch (const Error& e) {
      fail(e.kind(), source.name(), "{}", e.message());  // it is the text that does not fit: name its file, not the model's
    }
  }

  void append(const std::vector<TokenId>& ids, FileDocuments& file) {
    const std::size_t first = file.ids.size();
    file.ids.insert(file.ids.end(), ids.begin(), ids.end());
    n_cut_off_ += cut_windows(first, file.ids.size(), request_.seq_len, file);
  }

  void read_ids(const SourceText& source, FileDocuments& file) {
    IdLines lines = read_id_lines(source.text(), tokenizer_.vocab_size(), source.name());
    file.ids = std::move(lines.ids);
    for (auto [begin, end] : lines.lines) {
      if (file.adds_bos && file.ids[begin] == *tokenizer_.bos()) ++begin;
      if (begin == end) ++n_empty_;
      n_cut_off_ += cut_windows(begin, end, request_.seq_len, file);
    }
  }

  void read_rows(const SourceText& source, FileDocuments& file) {
    const std::vector<DataRow> rows = read_data_rows(source.text(), source.name());
    if (!template_) {
      const auto is_chat = [](const DataRow& row) { return !row.messages.empty(); };
      if (const auto chat = std::find_if(rows.begin(), rows.end(), is_chat); chat != rows.end())
        fail(ErrorKind::kUnsupported, source.name(), "{} is a conversation ({} of {} rows are); say how it is written with --chat-template chatml|llama3|plain",
             chat->name, std::count_if(rows.begin(), rows.end(), is_chat), rows.size());
    }
    for (const DataRow& row : rows) {
      try {
        if (!row.messages.empty()) append(template_->encode(row.messages), file);
        else if (has_usable_text(row.text)) add_text(row.text, file);
        else ++n_empty_;
      } catch (const Error& e) {
        fail(e.kind(), source.name() + ": " + row.name, "{}", e.message());
      }
    }
  }

  void report(const FileDocuments& file) const {
    if (n_bos_texts_ > 0)
      log_.warning(fmt::format("{}: {} text{} already with {}; it is dropped there, because every document gets one", file.name, n_bos_texts_,
                               n_bos_texts_ == 1 ? " starts" : "s start", bos_text_));
    if (n_empty_ > 0) log_.note(fmt::format("{}: {} rows without text are left out", file.name, n_empty_));
    if (n_cut_off_ > 0)
      log_.note(fmt::format("{}: {} last tokens that would be a window of their own are left out: a single token predicts nothing", file.name, n_cut_off_));
  }

  const CorpusRequest& request_;
  const Tokenizer& tokenizer_;
  const LogSink& log_;
  std::optional<ChatTemplate> template_;
  std::string bos_text_;
  std::int64_t n_bos_texts_ = 0, n_cut_off_ = 0, n_empty_ = 0;
};

void check_request(const CorpusRequest& r, const Tokenizer& tokenizer) {
  if (r.data.empty()) fail(ErrorKind::kUsage, "--data", "no text given");
  const std::int64_t least = tokenizer.adds_bos() ? 2 : 1;
  if (r.seq_len < least) fail(ErrorKind::kUsage, "--seq-len", "is {}, expected at least {}{}", r.seq_len, least, least == 2 ? " (each window starts with BOS)" : "");
  if (r.max_positions > 0 && r.seq_len > r.max_positions)
    fail(ErrorKind::kUsage, "--seq-len", "is {}, but the model knows {} positions", r.seq_len, r.max_positions);
  if (r.num_samples < 0 || r.default_samples < 1)
    fail(ErrorKind::kUsage, "--num-samples", "is {}, expected a number from 1 up", r.num_samples < 0 ? r.num_samples : r.default_samples);
}

// Text that hardly varies gives statistics of itself rather than of the model.
void warn_of_monotony(const Corpus& corpus, const LogSink& log) {
  std::unordered_map<TokenId, std::int64_t> counts;
  for (const Document& d : corpus.documents)
    for (const TokenId id : d.ids) ++counts[id];
  const auto most = std::max_element(counts.begin(), counts.end(),
                                     [](const auto& a, const auto& b) { return a.second != b.second ? a.second < b.second : a.first > b.first; });
  const std::int64_t n = corpus.identity.n_tokens;
  if (n >= 256 && (counts.size() < 16 || most->second * 2 > n))
    log.warning(fmt::format("the text hardly varies: {} different ids among {} tokens, id {} makes up {:.0f} %", counts.size(), n, most->first,
                            100.0 * static_cast<double>(most->second) / static_cast<double>(n)));
}

void add_documents(const FileDocuments& file, int file_idx, const std::vector<std::int64_t>& chosen, const Tokenizer& tokenizer, Sha256& hash, Corpus& corpus) {
  DataFile entry{file.option.path, file.sha256, file.option.options, 0, 0};
  for (const std::int64_t i : chosen) {
    const auto [begin, end] = file.documents[static_cast<std::size_t>(i)];
    Document document;
    document.file_idx = file_idx;
    document.ids.reserve(end - begin + 1);
    if (file.adds_bos) document.ids.push_back(*tokenizer.bos());
    document.ids.insert(document.ids.end(), file.ids.begin() + static_cast<std::ptrdiff_t>(begin), file.ids.begin() + static_cast<std::ptrdiff_t>(end));
    const auto n = static_cast<std::int64_t>(document.ids.size());
    hash.update(&n, sizeof n);  // little-endian, as every supported machine
    hash.update(document.ids.data(), document.ids.size() * sizeof(TokenId));
    entry.n_documents += 1;
    entry.n_tokens += n;
    if (tokenizer.bos() && document.ids.front() == *tokenizer.bos()) ++corpus.identity.n_bos;
    corpus.documents.push_back(std::move(document));
  }
  corpus.identity.n_documents += entry.n_documents;
  corpus.identity.n_tokens += entry.n_tokens;
  corpus.identity.files.push_back(std::move(entry));
}

}  // namespace

std::int64_t Corpus::longest() const {
  std::size_t n = 0;
  for (const Document& d : documents) n = std::max(n, d.ids.size());
  return static_cast<std::int64_t>(n);
}

Corpus load_corpus(const CorpusRequest& request, const Tokenizer& tokenizer, const LogSink& log) {
  check_request(request, tokenizer);
  std::vector<DataOption> options;
  for (const std::string& value : request.data) options.push_back(parse_data_option(value));
  if (std::count_if(options.begin(), options.end(), [](const DataOption& o) { return o.path == "-"; }) > 1)
    fail(ErrorKind::kUsage, "--data", "standard input (-) is given twice");

  CorpusReader reader(request, tokenizer, log);
  std::vector<FileDocuments> files;
  for (const DataOption& option : options) files.push_back(reader.read(option));
  const auto chosen = choose_windows(files, {request.seq_len, request.num_samples, request.default_samples, request.first});

  Corpus corpus;
  corpus.identity.tokenizer_sha256 = tokenizer.sha256();
  corpus.identity.seq_len = request.seq_len;
  const auto has_rows = [](const FileDocuments& f) { return f.rows; };
  corpus.identity.joining = std::all_of(files.begin(), files.end(), has_rows)    ? "rows"
                            : std::none_of(files.begin(), files.end(), has_rows) ? "windows"
                                                                                 : "windows+rows";
  Sha256 hash;
  for (std::size_t i = 0; i < files.size(); ++i) {
    add_documents(files[i], static_cast<int>(i), chosen[i], tokenizer, hash, corpus);
    if (chosen[i].empty()) log.warning(fmt::format("{}: of {} none is taken", files[i].name, counted(files[i].n_documents(), "document")));
    else
      log.note(fmt::format("{}: {} of {} {}, {} tokens", files[i].name, chosen[i].size(), files[i].n_documents(), files[i].rows ? "rows" : "windows",
                           corpus.identity.files[i].n_tokens));
  }
  if (corpus.documents.empty())
    fail(ErrorKind::kInfeasible, "--data", "no document is left: the files are shorter than one window of {} tokens or their shares too small",
         request.seq_len);
  corpus.identity.documents_sha256 = hash.hex();
  warn_of_monotony(corpus, log);
  return corpus;
}

}  // namespace calib::text
