"""The keys of data.json: where the records are, what their columns mean, how batches are made."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mindspeed.config import CommaSeparated, ConfigError, Options

OWN_TEMPLATES = (
    *("tokenizer", "qwen2vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_nothink", "glm4.1v", "glm4v_moe"),
    *("internvl2_5", "llava", "mistral"),
)
"""Names that mean the chat template which comes with the model, the one it was trained with."""


class AttrOptions(Options):
    """Which column, key or role name of the data means what."""

    formatting: Literal["sharegpt", "openai", "alpaca"] = "sharegpt"
    """Layout of a record: a list of messages with tags, OpenAI's messages, or question columns."""
    messages: str | None = None
    """Column with the messages; without it conversations, and messages for openai."""
    role_tag: str = "from"
    """Key of a message that says who speaks."""
    content_tag: str = "value"
    """Key of a message that holds what is said."""
    user_tag: str = "human"
    """Role of the one who asks."""
    assistant_tag: str = "gpt"
    """Role of the model."""
    observation_tag: str | None = "observation"
    """Role of a tool that answers."""
    function_tag: str | None = "function_call"
    """Role of the model where it calls a tool."""
    system_tag: str | None = "system"
    """Role of a first message that is the system prompt."""
    system: str | None = None
    """Column with the system prompt."""
    tools: str | None = None
    """Column with the tools that may be called."""
    images: str | None = "images"
    """Column with the images: one, or a list, one for each <image>."""
    videos: str | None = "videos"
    """Column with the videos: one, or a list, one for each <video>."""
    prompt: str = "instruction"
    """alpaca: column with the question."""
    query: str | None = "input"
    """alpaca: column with more of the question."""
    response: str = "output"
    """alpaca: column with the answer."""
    history: str | None = None
    """alpaca: column with earlier turns."""


class BasicOptions(Options):
    """Which records are read and how they become samples."""

    dataset: Annotated[tuple[str, ...], CommaSeparated] = ()
    """Files with records: json, jsonl, parquet or csv; several as a list or with commas."""
    dataset_dir: str | None = None
    """Folder that paths of images and videos start from; without it that of the file of records."""
    template: str = "tokenizer"
    """Chat template: the model's own (tokenizer), or one of configs/finetune/templates.json."""
    enable_thinking: bool | None = None
    """Thoughts of templates that know them: true adds empty ones, false removes them."""
    cutoff_len: int | None = Field(default=None, ge=1)
    """Longest sample in tokens; --seq-length if it is not given. Text is cut, images never."""
    max_samples: int | None = Field(default=None, ge=1)
    """At most so many records of each file."""
    train_on_prompt: bool = False
    """Learn the questions too, except images and videos."""
    mask_history: bool = False
    """Learn the last answer of a conversation only."""
    packing: bool = False
    """Fill rows of cutoff_len tokens with several samples, which do not see each other."""
    neat_packing: Literal[True] | None = None
    """Accepted for existing files: samples of a row are always kept apart."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """A bad image, a missing file, too few placeholders: stop and name it, or skip and count."""
    val_dataset: Annotated[tuple[str, ...], CommaSeparated] = ()
    """Files with records for validation."""
    val_rate: float | None = Field(default=None, gt=0, lt=1)
    """Share of the records that is kept for validation; always the same ones."""
    val_max_samples: int | None = Field(default=None, ge=1)
    """At most so many records for validation."""
    preprocessing_num_workers: int | None = Field(default=None, ge=0)
    """Processes that check the records at the beginning."""
    preprocessing_batch_size: int | None = None
    """Accepted for existing files: records are handled one by one."""
    preprocess_on_fly: bool | None = None
    """Accepted for existing files: samples are always made when they are needed."""
    streaming: bool | None = None
    """Accepted for existing files: images and videos are always read when they are needed."""
    cache_dir: str | None = None
    """Accepted for existing files: nothing is cached."""
    overwrite_cache: bool | None = None
    """Accepted for existing files: nothing is cached."""

    @model_validator(mode="after")
    def _fits(self) -> BasicOptions:
        if self.train_on_prompt and self.mask_history:
            raise ConfigError("train_on_prompt learns what mask_history leaves out: choose one")
        if self.val_rate is not None and self.val_dataset:
            raise ConfigError("val_rate and val_dataset both say what validates: choose one")
        return self


class ProcessorOptions(Options):
    """The model's processor and the sizes of what it is given."""

    model_name_or_path: str
    """Folder of a Hugging Face model: its tokenizer and its processor are used."""
    use_fast_tokenizer: Literal[True] = True
    """Accepted for existing files: the fast tokenizer is the one there is."""
    trust_remote_code: bool = False
    """Run Python code that comes with the processor. Only for folders you trust."""
    image_max_pixels: int | None = Field(default=None, ge=1)
    """Larger images are made smaller before the processor sees them; without it, it decides."""
    image_min_pixels: int | None = Field(default=None, ge=0)
    """Smaller images are made larger."""
    crop_to_patches: bool | None = None
    """Whether the processor cuts an image into tiles, for those that can."""
    video_max_pixels: int | None = Field(default=None, ge=1)
    """Larger frames are made smaller."""
    video_min_pixels: int | None = Field(default=None, ge=0)
    """Smaller frames are made larger."""
    video_fps: float = Field(default=2.0, gt=0)
    """Frames that are taken of a second of video."""
    video_maxlen: int = Field(default=128, ge=1)
    """At most so many frames are taken of a video."""


class DatasetOptions(Options):
    """The section dataset_param."""

    dataset_type: Literal["huggingface"] = "huggingface"
    """Records of conversations with images and videos, for the processors of transformers."""
    attr: AttrOptions = AttrOptions()
    """What the columns mean."""
    basic_parameters: BasicOptions
    """What is read."""
    preprocess_parameters: ProcessorOptions
    """What makes tensors of it."""


class CollateOptions(Options):
    """How samples become a batch."""

    model_name: str | None = None
    """Accepted for existing files: the processor says what a batch holds."""
    ignore_pad_token_for_loss: Literal[True] = True
    """Accepted for existing files: padding is never trained."""
    pad_to_multiple_of: int = Field(default=8, ge=1)
    """Batches are as long as their longest sample, rounded up to a multiple of this."""


class DataloaderOptions(Options):
    """The section dataloader_param."""

    dataloader_mode: Literal["sampler", "base"] = "sampler"
    """Accepted for existing files: there is one loader."""
    sampler_type: Literal[
        "BaseRandomBatchSampler", "stateful_distributed_sampler", "SequentialSampler"
    ] = "BaseRandomBatchSampler"
    """SequentialSampler is shuffle false; the others are the same."""
    batch_size: int = Field(default=1, ge=1)
    """Samples of a micro-batch; --micro-batch-size wins."""
    num_workers: int = Field(default=0, ge=0)
    """Processes that prepare batches; --num-workers wins."""
    seed: int = 1234
    """Decides the order; --seed wins."""
    shuffle: bool = True
    """Another order in every epoch."""
    drop_last: bool = True
    """true: batches are full, and the tail of an epoch goes on into the next one. false: the last
    batch of an epoch is smaller."""
    pin_memory: bool = False
    """Prepare batches in host memory that copies faster to a device."""
    prefetch_factor: int | None = Field(default=None, ge=1)
    """Batches that each process prepares ahead."""
    persistent_workers: bool | None = None
    """Keep the processes between epochs; without it they are kept."""
    data_sharding: bool | None = None
    """Accepted for existing files: every rank has its own part."""
    collate_param: CollateOptions = CollateOptions()
    """How samples become a batch."""


class DataConfig(Options):
    """Everything that data.json says."""

    dataset_param: DatasetOptions
    """The records."""
    dataloader_param: DataloaderOptions = DataloaderOptions()
    """The batches."""

    def for_run(
        self,
        *,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        num_workers: int | None = None,
        seed: int | None = None,
    ) -> DataConfig:
        """Return these options with what the command line says of a run; its values win."""
        data, loader = self.dataset_param, self.dataloader_param
        basic = _with(data.basic_parameters, cutoff_len=seq_length)
        loader = _with(loader, batch_size=micro_batch_size, num_workers=num_workers, seed=seed)
        data = _with(data, basic_parameters=basic)
        return DataConfig(dataset_param=data, dataloader_param=loader)


def _with(options: Any, **values: Any) -> Any:
    given = {name: value for name, value in values.items() if value is not None}
    return options.model_copy(update=given)
