"""What a program was doing when it raised: told by the frames of its traceback, from the innermost outwards."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jobs.postmortem.tracebacks import Frame

# In this order for each frame; the first that fits any frame from the inside names the operation. Patterns of
# "path:function" and of the line of code.
_KNOWN = (
    ("import", r"importlib/__init__|<frozen importlib|_bootstrap>|importlib\._bootstrap", r"^(?:from [\w.]+ )?import [\w.]+"),
    ("rendezvous", r":(?:init_process_group|_rendezvous_helper|rendezvous|_env_rendezvous_handler|_tcp_rendezvous_handler|_create_c10d_store|next_rendezvous|init_distributed|initialize_distributed|_init_dist_pytorch)$|elastic/rendezvous|jax/_src/distributed", r"init_process_group\(|TCPStore\(|init_distributed\(|jax\.distributed\.initialize"),
    ("hub", r"huggingface_hub/|transformers/utils/hub|datasets/(?:load|utils/file_utils|download)|torch/hub\.py|modelscope/|wandb/sdk|urllib3/|requests/|httpx/|aiohttp/client|botocore/|google/cloud/storage|gcsfs|s3fs|fsspec/implementations/http", r"snapshot_download\(|hf_hub_download\("),
    ("arguments", r"argparse\.py|/click/|/hydra/|/omegaconf/|jsonargparse|/fire/core|/tyro/|/simple_parsing/|/absl/(?:app|flags)|hf_argparser|/pydantic|/yaml/|/tomllib/|/toml/|configparser|/draccus/|/jsonschema/|:(?:parse_args|parse_known_args|parse_config|load_config|validate_args|read_config|get_config|load_yaml|parse_args_into_dataclasses|validate_config|check_config)$", r"parse_args\(|OmegaConf\.|yaml\.(?:safe_)?load\(|argparse\."),
    ("checkpoint.save", r":(?:save_checkpoint|save_pretrained|save_state|_save_checkpoint|save_model|_save|_legacy_save|save_file|write_end_of_file|async_save|dump_checkpoint|save_to_checkpoint)$|checkpoint/state_dict_saver|safetensors/.*:save", r"torch\.save\(|save_file\(|save_checkpoint\(|\.save\("),
    ("checkpoint.load", r":(?:load_checkpoint|load_state_dict|from_pretrained|_load_state_dict_into_model|load_pretrained|load_from_checkpoint|resume_from_checkpoint|_load_from_checkpoint|_load_checkpoint|resume|restore|restore_checkpoint|load_model|load_sharded_checkpoint|load_state|load_weights|_open_zipfile_reader|_legacy_load|load_file|load_torch_file|load_checkpoint_in_model|_load_pretrained_model|load_checkpoint_to_cpu|load_adapter|load_lora)$|torch/serialization\.py:(?:load|_load|__init__)|checkpoint/state_dict_loader|orbax/checkpoint|safetensors/.*:(?:load|safe_open)", r"torch\.load\(|load_state_dict\(|from_pretrained\(|safe_open\(|load_file\("),
    ("collective", r"torch/distributed/(?:distributed_c10d|_functional_collectives|nn/functional)|:(?:all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|all_to_all\w*|gather_object|scatter\w*|monitored_barrier|_verify_params_across_processes|_sync_params_and_buffers|_sync_module_states|sync_params|synchronize)$|/mpi4py/|horovod/", r"dist\.(?:all_reduce|all_gather|broadcast|barrier|reduce_scatter|all_to_all)|\.allreduce\("),
    ("data", r"torch/utils/data|/datasets/(?:arrow|iterable|table|builder|formatting|packaged|features)|webdataset|torchvision/datasets|:(?:__getitem__|__getitems__|_next_data|_try_get_data|_get_data|_process_data|collate_fn|_worker_loop|fetch|load_data\w*|load_dataset|read_csv|read_parquet|read_json|get_batch|build_dataset\w*|prepare_data|make_dataset|get_dataset\w*|create_dataset|iter_samples|decode_\w+|read_image|load_image|tokenize\w*)$|/PIL/|/cv2/|/pandas/io|/pyarrow/|/h5py/|/lmdb|indexed_dataset|streaming/base|/dali/|tensorflow/python/data|/zarr/|/tarfile|/zipfile|/gzip", r"load_dataset\(|read_csv\(|Image\.open\(|np\.load\(|DataLoader\(|h5py\.File\("),
    ("compile", r"torch/_dynamo|torch/_inductor|torch/fx/|/triton/|nvcc|cpp_extension|jax/_src/(?:pjit|compiler|dispatch)", r"torch\.compile\("),
    ("model", r":(?:build_model|create_model|get_model|make_model|init_model|model_provider|_build_model|from_config|instantiate_model|setup_model|initialize_model|build_from_cfg)$", r"build_model\(|create_model\("),
    ("step", r":(?:forward|backward|training_step|train_step|step|_step|compute_loss|loss_fn|train_batch|optimizer_step|train_one_epoch|run_step|forward_step|forward_backward\w*|_call_impl|_wrapped_call_impl)$|torch/optim/|torch/autograd|torch/nn/", r"\.backward\(|optimizer\.step\("),
    ("launch", r"subprocess\.py|elastic/|torch/distributed/(?:run|launch)|accelerate/commands|deepspeed/launcher|multiprocessing/(?:process|popen|spawn|context)", r""),
)
OPERATIONS = tuple(name for name, _, _ in _KNOWN)
_COMPILED = [(name, re.compile(place), re.compile(code) if code else None) for name, place, code in _KNOWN]


def operations_of(frames: Sequence[Frame]) -> tuple[str, ...]:
    """Everything that was being done, the innermost first: reading data in an import is both."""
    found: dict[str, None] = {}
    for frame in reversed(frames):
        place = f"{frame.path}:{frame.function}"
        for name, at, code in _COMPILED:
            if at.search(place) or (code is not None and frame.code and code.search(frame.code)):
                found.setdefault(name)
    return tuple(found)
