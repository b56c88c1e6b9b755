"""The zoo of libraries: classes and functions of well-known libraries whose results a default may be.

One argument of a class, as in `zoo`, for each call below, which stands for others of its kind.
"""

import importlib.util
import linecache
import re
import sys
import types
import warnings

CALLS = [
    "nn.BatchNorm2d(4, momentum=0.2)",
    "nn.Embedding(5, 2, padding_idx=0)",
    "nn.LSTM(2, 3, num_layers=2, batch_first=True, proj_size=1)",
    "nn.ModuleDict({'a': nn.ReLU(), 'b': nn.LSTM(2, 3)})",
    "nn.MultiheadAttention(8, num_heads=2)",
    "nn.ParameterList([torch.ones(2), torch.zeros(1)])",
    "nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), num_layers=1)",
    "torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))",
    "torch.optim.swa_utils.AveragedModel(nn.Linear(1, 1))",
    "torch.optim.LBFGS(DUMMY_PARAMS)",
    "functools.partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=5)",
    "functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=torch.nn.functional.relu)",
    "torchmetrics.BootStrapper(torchmetrics.MeanAbsoluteError())",
    "torchmetrics.ClasswiseWrapper(torchmetrics.Accuracy(task='multiclass', num_classes=2, average=None))",
    "torchmetrics.MetricCollection([torchmetrics.MeanAbsoluteError(), torchmetrics.R2Score()])",
    "torchmetrics.PanopticQuality({0, 1}, {6, 7})",
    "np.arange(6.0)",
    "np.random.default_rng(3)",
    "np.random.default_rng()",
    "random.Random(3)",
    "threading.Lock()",
    "collections.defaultdict(list)",
    "sklearn.ensemble.RandomForestClassifier(max_depth=3)",
    "sklearn.pipeline.Pipeline([('scale', sklearn.preprocessing.StandardScaler()), ('svc', sklearn.svm.SVC(C=2.0))])",
    "sklearn.model_selection.GridSearchCV(sklearn.svm.SVC(), {'C': [1, 10]})",
]

TRANSFORMERS = [
    "transformers.BertModel(transformers.BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2))",
    "transformers.BertConfig(num_labels=3)",
    "transformers.AutoModel.from_config(transformers.BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2))",
    "transformers.BertTokenizerFast(vocab={'[UNK]': 0, '[PAD]': 1, 'a': 2})",
    "tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0, '?': 1}, unk_token='?'))",
    "functools.partial(transformers.get_linear_schedule_with_warmup, num_warmup_steps=2, num_training_steps=9)",
]
"""Models of all architectures are constructed from a config in the same way; tokenizers are Rust objects."""


def _text(calls: dict[str, str]) -> str:
    """Return a module as a user would write it."""
    modules = {module for call in calls.values() for module in re.findall(r"(?<![\w.])((?:[a-z_]\w*\.)+)", call)}
    imports = {f"import {module.rstrip('.')}" for module in modules if not module.startswith(("nn.", "np."))}
    header = ["import numpy as np", *sorted(imports), "from torch import nn", "from mlx_runtime import DUMMY_PARAMS"]
    arguments = [f"        {name}={call}," for name, call in calls.items()]
    return "\n".join(
        [*header, "", "class KeepLibraries:", "    def __init__(", "        self,", *arguments, "    ): ...", ""]
    )


def _made(name: str, text: str) -> types.ModuleType:
    """Create a module from its source, which can be read although there is no file."""
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = (len(text), None, text.splitlines(keepends=True), module.__file__)
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec"), vars(module))
    return module


def kept() -> type:
    """Return a class with one argument per default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, or requires another option
        more = TRANSFORMERS if importlib.util.find_spec("transformers") else []
        calls = {re.sub(r"\W+", "_", call).strip("_"): call for call in [*CALLS, *more]}
        return _made("zoo_of_libraries", _text(calls)).KeepLibraries  # type: ignore[no-any-return]
