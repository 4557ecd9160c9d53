"""datatrove's MinHash stages 2 and 3 over signatures in its own format; run by ``dedup_scale.py`` with its Python.

python dedup_peer.py buckets|cluster FOLDER BANDS ROWS PROCESSES
"""

from __future__ import annotations

import multiprocessing
import sys

from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.utils.hashing import HashConfig


def buckets(folder: str, config: MinhashConfig, rank: int) -> None:
    MinhashDedupBuckets(f"{folder}/sig", f"{folder}/dups", config=config, lines_to_buffer=1000).run(
        None, rank, config.num_buckets
    )


def main() -> None:
    stage, folder = sys.argv[1:3]
    bands, rows, processes = map(int, sys.argv[3:])
    config = MinhashConfig(num_buckets=bands, hashes_per_bucket=rows, hash_config=HashConfig(precision=32))
    if stage == "buckets":
        with multiprocessing.Pool(processes, maxtasksperchild=1) as pool:
            pool.starmap(buckets, [(folder, config, rank) for rank in range(bands)], chunksize=1)
    else:
        sys.setrecursionlimit(10**6)
        MinhashDedupCluster(f"{folder}/dups", f"{folder}/out", config=config).run()


if __name__ == "__main__":
    main()
