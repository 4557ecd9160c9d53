"""What is read or planned without a device imports neither torch nor Ray: seconds of a command that only looks.

Import contracts (``make lint``) hold what a module imports anywhere in it; these programs also call what imports late.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.data_pipeline import ARTICLE

PROGRAMS = {
    "sizes of a model": "import quern.model.config",
    "the order and its recipe": "import quern.mixtures.recipe",
    "status of a data run": "import quern.cli.data, quern.data_pipeline.monitoring.run_status",
    "a swarm and its laws": """
        import quern.train.swarm.run, quern.mixtures.laws.propose, quern.mixtures.laws.tables, quern.cli.mix
        assert "scipy" not in sys.modules
    """,
    "ledger and consumers": "import quern.train.history.ledger, quern.train.history.consumers",
    "a training run as a page": "import quern.train.report, quern.cli.train.report",
    "a training run's step, planned": """
        from quern.parallel.planning.mesh import plan_mesh
        from quern.planner.answer import planned
        from quern.planner.hardware import load_hardware
        from quern.train.config import TrainConfig
        from quern.train.summary import layout_of_config, peak_memory, run_state, step_of
        keys = dict(run_dir="x", steps=1, data=[{"path": "y", "weight": 1}], global_batch=8, precision="bf16")
        config = TrainConfig(**keys, schedule={"warmup": 0})
        step = step_of(config, config.model.shape(1000), layout_of_config(config, plan_mesh(config.parallel, 8)))
        assert peak_memory(step, config) and planned(step, run_state(config), load_hardware("h100"))["time"]
    """,
    "checkpoints, listed": """
        import quern.train.checkpoint.format.manifest, quern.train.checkpoint.retention.save_interval
    """,
    "checkpoints, moved": """
        import quern.train.checkpoint.tiers.upload, quern.train.checkpoint.mirror.peers
        import quern.train.checkpoint.mirror.peer_server, quern.train.checkpoint.tiers.mover
    """,
    "lineage": """
        import quern.lineage.exposure, quern.lineage.steps, quern.lineage.sql.query, quern.lineage.purge.proof.verify
        import quern.lineage.training, quern.cli.lineage.step, quern.cli.lineage.exposure
    """,
    "the names of the package": "import quern; quern.Lineage, quern.ShardReader, quern.InputError",
    "the search for a layout": """
        from quern.model.config import ModelConfig
        from quern.planner.candidates import Wish
        from quern.planner.hardware import load_hardware
        from quern.planner.memory.peak import State
        from quern.planner.search import Search
        found = Search(Wish(ModelConfig(preset="1B").shape(1000), 2, 2, 4096, 8), State(), load_hardware("h100"))
        assert found.best is not None
    """,
    "a layout, planned and checked": """
        from quern.model.config import ModelConfig
        from quern.parallel.planning.checks import Task, check_layout
        from quern.parallel.planning.layout import Layout
        from quern.parallel.planning.mesh import plan_mesh
        from quern.train.config import ParallelConfig
        keys = ParallelConfig(pp=2, tp=2, schedule="looped_bfs")
        layout = Layout(None, plan_mesh(keys, 8), seq_len=64, schedule=keys.schedule)
        check_layout(ModelConfig(preset="1B").shape(1000), layout, Task({"global_batch": 8}))
    """,
    "a step's bytes, counted": """
        from quern.model.config import ModelConfig
        from quern.parallel.planning.layout import Layout
        from quern.parallel.planning.mesh import MeshPlan
        from quern.parallel.planning.traffic import Step, traffic
        layout = Layout(None, MeshPlan(pp=2, tp=2, dp_shard=2), seq_len=64)
        assert traffic(Step(ModelConfig(preset="1B").shape(1000), layout, 8, 2, 4))
    """,
    "machines, waited for and judged": "import quern.cli.doctor",
    "a page through the chain": f"""
        from quern.data_pipeline.chain import Chain
        from quern.data_pipeline.config import ChainConfig
        from quern.data_pipeline.page.document import Page
        page, _ = Chain(ChainConfig())(Page("s", "f", "f", 0, raw={ARTICLE!r}, media="text"))
        assert page.stage is None, page.failed_rules
        assert "spacy" in sys.modules
    """,
}


@pytest.mark.slow
def test_neither_torch_nor_ray_is_imported() -> None:
    """All in one process, in turn: the one that is the first to load either is named."""
    program = """
import json, sys, textwrap
for name, code in json.load(sys.stdin).items():
    exec(textwrap.dedent(code))
    loaded = {"torch", "ray"} & set(sys.modules)
    assert not loaded, f"{name} imports {loaded}"
"""
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(PROGRAMS), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
