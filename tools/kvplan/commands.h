#pragma once
// One function per sub-command; each returns the exit code.

#include "libcalib/plan/plan.h"
#include "tools/common/cli_main.h"
#include "tools/common/progress.h"
#include "tools/kvplan/options.h"

namespace calib::tools {

int run_kvplan(const KvplanOptions& options, const Invocation& call);

int run_plan(const KvplanOptions& options, const Invocation& call, Progress& progress);
int run_show(const KvplanOptions& options, const Invocation& call, Progress& progress);
int run_explain(const KvplanOptions& options, const Invocation& call, Progress& progress);
int run_check(const KvplanOptions& options, const Invocation& call, Progress& progress);
int run_diff(const KvplanOptions& options, const Invocation& call, Progress& progress);
int run_memory(const KvplanOptions& options, const Invocation& call, Progress& progress);
/// `kvplan memory --model` or `--stats`: every preset on every layer.
int run_memory_of_model(const KvplanOptions& options, const Invocation& call, Progress& progress);
int run_import(const KvplanOptions& options, const Invocation& call, Progress& progress);
int run_list(const KvplanOptions& options, const Invocation& call, Progress& progress);

}  // namespace calib::tools
