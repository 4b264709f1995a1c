#include "libcalib/base/sha256.h"

#include <gtest/gtest.h>

#include "tests/support/expect_error.h"
#include "tests/support/temp_folder.h"

namespace calib {
namespace {

TEST(Sha256, KnownAnswers) {  // FIPS 180-2 examples
  EXPECT_EQ(sha256_hex(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256_hex("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256_hex(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesEqualTheWhole) {
  Sha256 h;
  h.update("a");
  h.update("");
  h.update("bc");
  EXPECT_EQ(h.hex(), sha256_hex("abc"));
}

TEST(Sha256, OfFiles) {
  test::TempFolder folder;
  const std::string big(std::size_t{17} << 20, 'x');  // more than two steps of the reader
  test::write_file(folder.file("big"), big);
  test::write_file(folder.file("empty"), "");
  EXPECT_EQ(sha256_of_file(folder.file("big")), sha256_hex(big));
  EXPECT_EQ(sha256_of_file(folder.file("empty")), sha256_hex(""));
  test::expect_error([&] { sha256_of_file(folder.file("none")); }, ErrorKind::kNotFound, {folder.file("none")});
}

}  // namespace
}  // namespace calib
