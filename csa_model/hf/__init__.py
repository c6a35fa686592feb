# SPDX-License-Identifier: Apache-2.0
"""Export to, import from and comparison with the Hugging Face form of DeepSeek-V4. `python -m csa_model.hf --help`."""

from csa_model.hf.config_map import hf_config, model_config, reasons_against
from csa_model.hf.export import Exported, export
from csa_model.hf.importing import import_directory, read_directory

__all__ = ["Exported", "export", "hf_config", "import_directory", "model_config", "read_directory", "reasons_against"]
