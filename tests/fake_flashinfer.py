"""FlashInfer's paged attention in plain torch: what our attention relies on, and nothing else.

Arguments, checks and masks are those of BatchPrefillWithPagedKVCacheWrapper and its fa2 kernel in
flashinfer-python 0.6.0 and 0.7.4 (prefill.py, page.py, utils.py, attention/{prefill,variants}.cuh).
"""

import torch
from torch import Tensor

# The kernel is one operator, so that a recorder sees it as such: it reads its table when it runs.


@torch.library.custom_op("paceline_tests::paged_prefill", mutates_args=())
def paged_prefill(
    q: Tensor,
    pages: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    last_page_len: Tensor,
    sm_scale: float,
    window_left: int,
    top_left: bool,
) -> Tensor:
    """Causal attention of each request's queries over its pages: [rows, heads, head_dim]."""
    out = torch.zeros(q.shape, dtype=q.dtype)
    key_pages, value_pages = pages.unbind(1)
    for request, last in enumerate(last_page_len.tolist()):
        rows = slice(*qo_indptr[request : request + 2].tolist())
        own = kv_indices[slice(*kv_indptr[request : request + 2].tolist())].long()
        kv_len = max(len(own) - 1, 0) * pages.shape[2] + last
        keys, values = (part[own].flatten(0, 1)[:kv_len] for part in (key_pages, value_pages))
        qo_len = rows.stop - rows.start
        queries = torch.arange(qo_len)[:, None]
        seen = torch.arange(kv_len)[None]
        hidden = seen > queries if top_left else seen + qo_len > kv_len + queries
        if window_left >= 0:
            hidden |= seen + qo_len + window_left < kv_len + queries
        out[rows] = _attend(q[rows], keys, values, hidden, sm_scale)
    return out


def _attend(q: Tensor, keys: Tensor, values: Tensor, hidden: Tensor, sm_scale: float) -> Tensor:
    group = q.shape[1] // keys.shape[1]
    wide = torch.promote_types(q.dtype, torch.float32)
    keys, values = (x.to(wide).repeat_interleave(group, 1).transpose(0, 1) for x in (keys, values))
    scores = q.to(wide).transpose(0, 1) @ keys.transpose(1, 2) * sm_scale
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    return (weights @ values).transpose(0, 1).to(q.dtype)


class PagedWrapper:
    """BatchPrefillWithPagedKVCacheWrapper. Its subclasses here get it wrong in some way."""

    more_window = 0
    top_left = False

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert float_workspace_buffer.dtype is torch.uint8 and kv_layout == "NHD"
        assert backend in ("auto", "fa2", "fa3")
        given = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_last_page_len_buf)
        self._buffers: list[Tensor] = []
        self._indices = torch.empty(0)
        self._rows = -1
        self._graph = use_cuda_graph
        if not use_cuda_graph:
            return
        assert paged_kv_indices_buf is not None
        self._buffers = [buffer for buffer in given if buffer is not None]
        self._indices = paged_kv_indices_buf
        assert [len(buffer) for buffer in self._buffers] == [len(self._buffers[0])] * 2 + [
            len(self._buffers[0]) - 1
        ]

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        tables = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        assert all(table.dtype is torch.int32 for table in (*tables, paged_kv_indices))
        assert int(paged_kv_indptr[-1]) == len(paged_kv_indices)
        assert bool((qo_indptr.diff() > 0).all() and (paged_kv_indptr.diff() > 0).all())
        assert num_qo_heads % num_kv_heads == 0 and causal and not non_blocking
        self._form = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._types = (q_data_type, q_data_type if kv_data_type is None else kv_data_type)
        self._scale = head_dim_qk**-0.5 if sm_scale is None else sm_scale
        self._window_left = window_left
        if not self._graph:
            self._buffers = [table.clone() for table in tables]
            self._indices = paged_kv_indices.clone()
        else:
            if self._rows not in (-1, int(qo_indptr[-1])) or len(qo_indptr) != len(
                self._buffers[0]
            ):
                raise ValueError("the batch size should be fixed in cuda graph mode")
            if len(paged_kv_indices) > len(self._indices):
                raise ValueError("paged_kv_indices exceeds the allocated buffer size")
            for buffer, table in zip(self._buffers, tables, strict=True):
                buffer.copy_(table)
            self._indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
        self._rows = int(qo_indptr[-1])

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        heads, kv_heads, head_dim, page_size = self._form
        assert (q.dtype, paged_kv_cache.dtype) == self._types
        assert q.shape == (self._rows, heads, head_dim), "q does not match qo_indptr"
        assert paged_kv_cache.shape[1:] == (2, page_size, kv_heads, head_dim)
        assert q.stride(-1) == paged_kv_cache.stride(-1) == 1
        queries, keys, last = self._buffers
        window = self._window_left + self.more_window if self._window_left >= 0 else -1
        table = (queries, keys, self._indices, last)
        out: Tensor = paged_prefill(q, paged_kv_cache, *table, self._scale, window, self.top_left)
        return out
