// encode_text FOLDER|FILE.gguf [--special] < text > ids: what scripts/check_tokenizer.py compares with the reference.

#include <cstdio>
#include <cstring>
#include <iterator>
#include <string>

#include <fmt/format.h>

#include "libcalib/base/mapped_file.h"
#include "libcalib/text/tokenizer.h"
#include "libcalib/weights/gguf.h"

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  const std::string source = argv[1];
  const bool parse_special = argc > 2 && std::strcmp(argv[2], "--special") == 0;
  try {
    std::unique_ptr<calib::text::Tokenizer> tokenizer;
    if (source.ends_with(".gguf")) {
      auto metadata = calib::weights::parse_gguf(calib::MappedFile(source)).metadata;
      metadata.path = source;
      tokenizer = calib::text::load_tokenizer_gguf(metadata);
    } else {
      tokenizer = calib::text::load_tokenizer_json(source);
    }
    std::string text;
    char block[1 << 16];
    while (const std::size_t n = std::fread(block, 1, sizeof block, stdin)) text.append(block, n);
    std::string out;
    for (const auto id : tokenizer->encode(text, parse_special)) fmt::format_to(std::back_inserter(out), "{}\n", id);
    std::fwrite(out.data(), 1, out.size(), stdout);
  } catch (const calib::Error& e) {
    fmt::print(stderr, "error: {}\n", e.what());
    return calib::exit_code(e.kind());
  }
}
