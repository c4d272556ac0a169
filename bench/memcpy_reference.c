/* The limit the shared-memory transports are compared with: one memcpy for each block, in a loop, in one thread.
 * A reference only; kvxfer has no C in it. Built and called by contenders/memcpy_peer.py.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

void copy_blocks(const uint64_t *destination, const uint64_t *source, size_t block_nbytes, size_t count)
{
    for (size_t row = 0; row < count; row++)
        memcpy((void *)(uintptr_t)destination[row], (const void *)(uintptr_t)source[row], block_nbytes);
}
