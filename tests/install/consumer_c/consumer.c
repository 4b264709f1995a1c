/* The installed kvrt from a project of C alone. */
#include <stdio.h>
#include <string.h>

#include "kernels/kvrt.h"

int main(void) {
  kvrt_plan* plan = NULL;
  kvrt_error err;
  if (kvrt_plan_load("no such plan.json", NULL, &plan, &err) != KVRT_E_IO || strstr(err.text, "no such plan.json") == NULL) {
    printf("kvrt_plan_load: %d %s\n", (int)err.status, err.text);
    return 1;
  }
  printf("consumer: ok\n");
  return 0;
}
