#include "tools/common/run_options.h"

#include <limits>

#include <CLI/CLI.hpp>

#include "libcalib/text/data_option.h"
#include "tools/common/option_values.h"

namespace calib::tools {

void add_run_options(CLI::App& app, RunOptions& o) {
  add_text(app, "--model", o.model, "Hugging Face folder or GGUF file", "Input", "M");
  app.add_option("--data", o.data, "Text: F[:share=0.3,num=64,skip=10] of type .txt, .jsonl or .ids, - for standard input; several allowed")
      ->type_name("F...")
      ->group("Input");
  add_integer(app, "--num-samples", o.num_samples, 0, 1 << 24,
              fmt::format("Windows to take; 0 = up to {}, fewer if the text is shorter", o.default_samples), "Input");
  add_integer(app, "--seq-len", o.seq_len, 1, 1 << 24, "Tokens of a window", "Input");
  add_flag(app, "--first", o.first, "Take the first windows instead of evenly spaced ones", "Input");
  add_text(app, "--chat-template", o.chat_template, "Template of chat rows: chatml, llama3 or plain", "Input", "NAME");
  add_integer(app, "--seed", o.seed, 0, std::numeric_limits<std::int64_t>::max(), "Seed of everything that is sampled", "Input");
  add_text(app, "--device", o.device, "cpu, cuda or cuda:<index>", "Device", "DEVICE");
  add_text(app, "--dtype", o.dtype, "auto (fp32 on CPU, bf16 on CUDA), fp32 or bf16", "Device", "DTYPE");
  add_bytes(app, "--hidden-mem", o.hidden_mem, "Memory for hidden states; more go to a temporary file in $TMPDIR", "Device");
  add_flag(app, "--fast-identity", o.fast_identity, "Identify the weights by sizes and header instead of content", "Diagnostics");
  add_flag(app, "--dry-run", o.dry_run, "Print resolved options and predicted time, memory and disk, and stop", "Diagnostics");
}

void require_model_and_data(const RunOptions& options) {
  if (options.model.empty()) fail(ErrorKind::kUsage, "--model", "is required: a Hugging Face folder or a GGUF file");
  if (options.data.empty()) fail(ErrorKind::kUsage, "--data", "is required: at least one .txt, .jsonl or .ids file, or -");
  for (const std::string& data : options.data)
    if (data.empty()) fail(ErrorKind::kUsage, "--data", "is empty, expected the name of a .txt, .jsonl or .ids file, or -");
}

std::vector<std::string> inputs_of(const RunOptions& options) {
  std::vector<std::string> inputs = {options.model};
  for (const std::string& data : options.data) inputs.push_back(text::parse_data_option(data).path);
  return inputs;
}

model::ModelOptions model_options(const RunOptions& options, const Invocation& call) {
  model::ModelOptions result;
  result.device = options.device;
  result.dtype = options.dtype;
  result.n_threads = call.n_threads();
  result.fast_identity = options.fast_identity;
  return result;
}

text::CorpusRequest corpus_request(const RunOptions& options, std::int64_t max_positions) {
  text::CorpusRequest request;
  request.data = options.data;
  request.seq_len = options.seq_len;
  request.num_samples = options.num_samples;
  request.default_samples = options.default_samples;
  request.first = options.first;
  request.chat_template = options.chat_template;
  request.max_positions = max_positions;
  return request;
}

}  // namespace calib::tools
