"""How a kernel is compiled.

In a parallel kernel nothing is written to an array that is a field of a named tuple: Numba takes
such a write for dead and drops it. What threads do is therefore in functions of its own.
"""

import torch
from numba import njit
from numba.np.ufunc.parallel import _launch_threads


def _start_threads() -> None:
    """Start the kernels' threads, and leave torch's count as it is.

    Numba starts them before its first parallel kernel, and sets the count of OpenMP, which torch
    shares, to the number of cores.
    """
    threads = torch.get_num_threads()
    _launch_threads()
    torch.set_num_threads(threads)


_start_threads()

# A sum may be reordered by the compiler: the same way for every row, as all run the same code.
REORDERED = {"reassoc", "contract", "nsz"}
FUSED = {"contract"}

kernel = njit(nogil=True, cache=True, error_model="numpy")
fused = njit(nogil=True, cache=True, error_model="numpy", fastmath=FUSED)
reordered = njit(nogil=True, cache=True, error_model="numpy", fastmath=REORDERED)
inlined = njit(nogil=True, cache=True, error_model="numpy", inline="always")
parallel = njit(nogil=True, cache=True, error_model="numpy", parallel=True)
