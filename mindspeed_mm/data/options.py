"""The options of data.json: the records, their columns, and the batches."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mindspeed.config import CommaSeparated, ConfigError, SectionOptions

OWN_TEMPLATES = (
    *("tokenizer", "qwen2vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_nothink", "glm4.1v", "glm4v_moe"),
    *("internvl2_5", "llava", "mistral"),
)
"""Names of the chat template that comes with the model, the one it was trained with."""
MOST_PIXELS, MOST_SAMPLES, MOST_WORKERS = 2**26, 2**20, 1024
"""Of an image that is upscaled, of a micro-batch, and of a rank: more is a slip."""


class AttrOptions(SectionOptions):
    """Names of the columns, keys and roles of the data."""

    formatting: Literal["sharegpt", "openai", "alpaca"] = "sharegpt"
    """Layout of a record: messages with tags, OpenAI messages, or prompt and response columns."""
    messages: str | None = None
    """Column with the messages; default conversations, and messages for openai."""
    role_tag: str = "from"
    """Key of the role of a message."""
    content_tag: str = "value"
    """Key of the content of a message."""
    user_tag: str = "human"
    """Role of the user."""
    assistant_tag: str = "gpt"
    """Role of the assistant."""
    observation_tag: str | None = "observation"
    """Role of tool results."""
    function_tag: str | None = "function_call"
    """Role of tool calls of the assistant."""
    system_tag: str | None = "system"
    """Role of the system prompt, if it is the first message."""
    system: str | None = None
    """Column with the system prompt."""
    tools: str | None = None
    """Column with the tool definitions."""
    images: str | None = "images"
    """Column with the images: one, or a list, one for each <image>."""
    videos: str | None = "videos"
    """Column with the videos: one, or a list, one for each <video>."""
    prompt: str = "instruction"
    """alpaca: column with the instruction."""
    query: str | None = "input"
    """alpaca: column with additional input of the instruction."""
    response: str = "output"
    """alpaca: column with the response."""
    history: str | None = None
    """alpaca: column with earlier turns."""


class BasicOptions(SectionOptions):
    """Which records are read, and how they become samples."""

    dataset: Annotated[tuple[str, ...], CommaSeparated] = ()
    """Files with records: json, jsonl, parquet or csv; several as a list or with commas."""
    dataset_dir: str | None = None
    """Folder of relative image and video paths; default the folder of the file of records."""
    template: str = "tokenizer"
    """Chat template: the model's own (tokenizer), or one of configs/finetune/templates.json."""
    enable_thinking: bool | None = None
    """Thinking of templates that support it: true adds empty thoughts, false removes them."""
    cutoff_len: int | None = Field(default=None, ge=1)
    """Maximum tokens of a sample; default --seq-length. Text is truncated, images never."""
    max_samples: int | None = Field(default=None, ge=1)
    """Maximum number of records of each file."""
    train_on_prompt: bool = False
    """Train on prompts too, except images and videos."""
    mask_history: bool = False
    """Train on the last answer of a conversation only."""
    packing: bool = False
    """Pack several samples into rows of cutoff_len tokens; they do not attend to each other."""
    neat_packing: Literal[True] | None = None
    """Accepted for existing files: packed samples never attend to each other."""
    on_bad_record: Literal["stop", "skip"] = "stop"
    """Bad image, missing file, wrong number of placeholders: stop with an error, or skip it."""
    val_dataset: Annotated[tuple[str, ...], CommaSeparated] = ()
    """Files with records for validation."""
    val_rate: float | None = Field(default=None, gt=0, lt=1)
    """Fraction of the records used for validation; always the same ones."""
    val_max_samples: int | None = Field(default=None, ge=1)
    """Maximum number of records for validation."""
    preprocessing_num_workers: int | None = Field(default=None, ge=0, le=MOST_WORKERS)
    """Workers that check the records at start."""
    preprocessing_batch_size: int | None = None
    """Accepted for existing files: records are processed one by one."""
    preprocess_on_fly: bool | None = None
    """Accepted for existing files: samples are always encoded on the fly."""
    streaming: bool | None = None
    """Accepted for existing files: images and videos are always read on the fly."""
    cache_dir: str | None = None
    """Accepted for existing files: nothing is cached."""
    overwrite_cache: bool | None = None
    """Accepted for existing files: nothing is cached."""

    @model_validator(mode="after")
    def _fits(self) -> BasicOptions:
        if self.train_on_prompt and self.mask_history:
            raise ConfigError("train_on_prompt trains on what mask_history masks: choose one")
        if self.val_rate is not None and self.val_dataset:
            raise ConfigError(
                "val_rate and val_dataset both define the validation data: choose one"
            )
        return self


class ProcessorOptions(SectionOptions):
    """The processor of the model, and the sizes of its inputs."""

    model_name_or_path: str
    """Folder of a Hugging Face model: its tokenizer and its processor are used."""
    use_fast_tokenizer: Literal[True] = True
    """Accepted for existing files: the fast tokenizer is always used."""
    trust_remote_code: bool = False
    """Run Python code that comes with the processor. Only for folders you trust."""
    image_max_pixels: int | None = Field(default=None, ge=1)
    """Larger images are downscaled before the processor; default no limit."""
    image_min_pixels: int | None = Field(default=None, ge=0, le=MOST_PIXELS)
    """Smaller images are upscaled."""
    crop_to_patches: bool | None = None
    """Whether the processor splits an image into tiles, if it supports that."""
    video_max_pixels: int | None = Field(default=None, ge=1)
    """Larger frames are downscaled."""
    video_min_pixels: int | None = Field(default=None, ge=0, le=MOST_PIXELS)
    """Smaller frames are upscaled."""
    video_fps: float = Field(default=2.0, gt=0, le=1000)
    """Frames sampled per second of video."""
    video_maxlen: int = Field(default=128, ge=1)
    """Maximum frames sampled from a video."""


class DatasetOptions(SectionOptions):
    """The section dataset_param."""

    dataset_type: Literal["huggingface"] = "huggingface"
    """Records of conversations with images and videos, for the processors of transformers."""
    attr: AttrOptions = AttrOptions()
    """Names of the columns."""
    basic_parameters: BasicOptions
    """Which records are read."""
    preprocess_parameters: ProcessorOptions
    """The processor."""


class CollateOptions(SectionOptions):
    """How samples are collated."""

    model_name: str | None = None
    """Accepted for existing files: the processor determines the contents of a batch."""
    ignore_pad_token_for_loss: Literal[True] = True
    """Accepted for existing files: padding never has a loss."""
    pad_to_multiple_of: int = Field(default=8, ge=1, le=2**24)
    """Batches are padded to their longest sample, rounded up to a multiple of this."""


class DataloaderOptions(SectionOptions):
    """The section dataloader_param."""

    dataloader_mode: Literal["sampler", "base"] = "sampler"
    """Accepted for existing files: there is one loader."""
    sampler_type: Literal[
        "BaseRandomBatchSampler", "stateful_distributed_sampler", "SequentialSampler"
    ] = "BaseRandomBatchSampler"
    """SequentialSampler disables shuffle; the others are the same."""
    batch_size: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    """Samples of a micro-batch; --micro-batch-size takes precedence."""
    num_workers: int = Field(default=0, ge=0, le=MOST_WORKERS)
    """DataLoader workers; --num-workers takes precedence."""
    seed: int = 1234
    """Seed of the shuffle; --seed takes precedence."""
    shuffle: bool = True
    """Shuffle in every epoch."""
    drop_last: bool = True
    """true: batches are full, and the tail of an epoch continues into the next one. false: the
    last batch of an epoch is smaller."""
    pin_memory: bool = False
    """Prepare batches in pinned host memory, for faster copies to the device."""
    prefetch_factor: int | None = Field(default=None, ge=1)
    """Batches that each worker prefetches."""
    persistent_workers: bool | None = None
    """Keep the workers between epochs; default true."""
    data_sharding: bool | None = None
    """Accepted for existing files: the data is always sharded over ranks."""
    collate_param: CollateOptions = CollateOptions()
    """How samples are collated."""


class DataConfig(SectionOptions):
    """The contents of data.json."""

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
        """Return these options with the values of the command line, which take precedence."""
        data, loader = self.dataset_param, self.dataloader_param
        basic = _with(data.basic_parameters, cutoff_len=seq_length)
        loader = _with(loader, batch_size=micro_batch_size, num_workers=num_workers, seed=seed)
        data = _with(data, basic_parameters=basic)
        return DataConfig(dataset_param=data, dataloader_param=loader)


def _with(options: Any, **values: Any) -> Any:
    given = {name: value for name, value in values.items() if value is not None}
    return options.model_copy(update=given)
