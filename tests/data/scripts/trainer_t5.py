"""transformers' Seq2SeqTrainer: a tokenizer trained here, a collator that pads, arguments out of a dataclass, label smoothing, Adafactor."""

from dataclasses import dataclass, field

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch.utils.data import Dataset
from transformers import DataCollatorForSeq2Seq, HfArgumentParser, PreTrainedTokenizerFast, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed
from transformers import T5Config, T5ForConditionalGeneration


@dataclass
class ModelArguments:
    width: int = field(default=128, metadata={"help": "Of every layer."})
    layers: int = field(default=2)


@dataclass
class DataArguments:
    source_length: int = field(default=48)
    target_length: int = field(default=16)


TEXTS = [f"translate number {n} into words please and be quick about it" for n in range(400)]


def make_tokenizer():
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainers.WordLevelTrainer(vocab_size=512, special_tokens=["<pad>", "</s>", "<unk>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


class Pairs(Dataset):
    def __init__(self, tokenizer, data):
        sources = tokenizer(TEXTS, padding="max_length", max_length=data.source_length)
        targets = tokenizer(TEXTS, padding="max_length", max_length=data.target_length)
        self.rows = [
            {"input_ids": ids, "attention_mask": mask, "labels": labels}
            for ids, mask, labels in zip(sources["input_ids"], sources["attention_mask"], targets["input_ids"])
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def main():
    parser = HfArgumentParser((ModelArguments, DataArguments, Seq2SeqTrainingArguments))
    given = ["--output_dir", "t5-out", "--per_device_train_batch_size", "12", "--learning_rate", "1e-3", "--max_steps", "50", "--optim", "adamw_torch"]
    given += ["--label_smoothing_factor", "0.1", "--lr_scheduler_type", "cosine", "--logging_steps", "1", "--report_to", "none"]
    model_args, data_args, training_args = parser.parse_args_into_dataclasses(given)
    set_seed(training_args.seed)
    tokenizer = make_tokenizer()
    config = T5Config(
        vocab_size=512, d_model=model_args.width, d_kv=32, d_ff=256, num_layers=model_args.layers, num_heads=4, decoder_start_token_id=0, dropout_rate=0.1
    )
    model = T5ForConditionalGeneration(config)
    rows = Pairs(tokenizer, data_args)
    trainer = Seq2SeqTrainer(
        model=model, args=training_args, train_dataset=rows, processing_class=tokenizer, data_collator=DataCollatorForSeq2Seq(tokenizer, model=model)
    )
    result = trainer.train()
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)


if __name__ == "__main__":
    main()
