from quern.data_pipeline.stages.extra.rules import Rule as Rule
from quern.data_run.run import run_data as run_data
from quern.errors import InputError as InputError
from quern.errors import QuernError as QuernError
from quern.lineage.answers.lineage import Lineage as Lineage
from quern.tokenize.shards import ShardReader as ShardReader
from quern.train.training_batches import batches as batches

__version__: str
