//! Models of usual shapes with random weights, written as GGUF files: what benches and servers can be tried with where no model is.
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use kernels::quant::{QuantType, random_blocks};
use kernels::weights::testing::{GgufWriter, TensorSource};

/// Shape of a dense model of the Qwen2 family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// How it is asked for.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Elements of a hidden row.
    pub width: usize,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements between the feed-forward matrices.
    pub ffn: usize,
    /// Tokens.
    pub vocab: usize,
    /// The output head is the embedding.
    pub tied: bool,
}

const fn shape(name: &'static str, dims: [usize; 7], tied: bool) -> Shape {
    let [layers, width, heads, kv_heads, head_dim, ffn, vocab] = dims;
    Shape { name, layers, width, heads, kv_heads, head_dim, ffn, vocab, tied }
}

/// The Qwen2.5 models (their `config.json` files).
pub const SHAPES: [Shape; 6] = [
    shape("qwen2.5-0.5b", [24, 896, 14, 2, 64, 4864, 151_936], true),
    shape("qwen2.5-1.5b", [28, 1536, 12, 2, 128, 8960, 151_936], true),
    shape("qwen2.5-3b", [36, 2048, 16, 2, 128, 11_008, 151_936], true),
    shape("qwen2.5-7b", [28, 3584, 28, 4, 128, 18_944, 152_064], false),
    shape("qwen2.5-14b", [48, 5120, 40, 8, 128, 13_824, 152_064], false),
    shape("qwen2.5-32b", [64, 5120, 40, 8, 128, 27_648, 152_064], false),
];

/// Bytes of random blocks that a matrix repeats: values do not matter to the time.
const PATTERN_BYTES: usize = 1 << 20;

impl Shape {
    /// A shape by its name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        SHAPES.into_iter().find(|shape| shape.name == name)
    }

    /// Writes the model with random weights in `quant`; vectors are ones, biases zeros.
    ///
    /// # Errors
    /// The file cannot be written, or rows are no whole blocks of the format.
    pub fn write(&self, path: &Path, quant: QuantType) -> io::Result<()> {
        let mut w = GgufWriter::default();
        w.text("general.architecture", "qwen2").text("general.name", self.name);
        for (key, value) in [
            ("block_count", self.layers),
            ("context_length", 32_768),
            ("embedding_length", self.width),
            ("feed_forward_length", self.ffn),
            ("attention.head_count", self.heads),
            ("attention.head_count_kv", self.kv_heads),
            ("attention.key_length", self.head_dim),
            ("attention.value_length", self.head_dim),
        ] {
            w.u32(&format!("qwen2.{key}"), value as u32);
        }
        w.f32("qwen2.attention.layer_norm_rms_epsilon", 1e-6).f32("qwen2.rope.freq_base", 1e6);
        self.vocabulary(&mut w);
        let tensors = self.tensors();
        let mut at = 0u64;
        let mut sizes = Vec::with_capacity(tensors.len());
        for (name, [rows, cols]) in &tensors {
            let kind = if *rows == 1 { QuantType::F32 } else { quant };
            let row = kind.row_bytes(*cols).ok_or_else(|| {
                io::Error::other(format!("{}: rows of {cols} are no whole blocks of {}", self.name, kind.name()))
            })?;
            let dims = if *rows == 1 { vec![*cols as u64] } else { vec![*cols as u64, *rows as u64] };
            w.tensors_mut().push(TensorSource {
                name: name.clone(),
                dims,
                kind: kind.ggml_id(),
                bytes: Vec::new(),
                offset: Some(at),
            });
            sizes.push((rows * row) as u64);
            at += ((rows * row) as u64).next_multiple_of(32);
        }
        let mut file = BufWriter::with_capacity(1 << 22, File::create(path)?);
        file.write_all(&w.header())?;
        let pattern = random_blocks(quant, PATTERN_BYTES / quant.block_bytes(), 1);
        for ((name, [rows, _]), size) in tensors.iter().zip(sizes) {
            let mut left = size as usize;
            if *rows == 1 {
                let number = if name.ends_with("bias") { 0f32 } else { 1f32 };
                file.write_all(&number.to_le_bytes().repeat(left / 4))?;
            } else {
                while left > 0 {
                    let part = left.min(pattern.len());
                    file.write_all(&pattern[..part])?;
                    left -= part;
                }
            }
            let padding = (size.next_multiple_of(32) - size) as usize;
            file.write_all(&[0; 32][..padding])?;
        }
        file.flush()
    }

    /// Names and shapes of all tensors.
    fn tensors(&self) -> Vec<(String, [usize; 2])> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let mut all = vec![("token_embd.weight".to_owned(), [self.vocab, self.width])];
        for layer in 0..self.layers {
            let parts = [
                ("attn_norm.weight", [1, self.width]),
                ("attn_q.weight", [q, self.width]),
                ("attn_k.weight", [kv, self.width]),
                ("attn_v.weight", [kv, self.width]),
                ("attn_q.bias", [1, q]),
                ("attn_k.bias", [1, kv]),
                ("attn_v.bias", [1, kv]),
                ("attn_output.weight", [self.width, q]),
                ("ffn_norm.weight", [1, self.width]),
                ("ffn_gate.weight", [self.ffn, self.width]),
                ("ffn_up.weight", [self.ffn, self.width]),
                ("ffn_down.weight", [self.width, self.ffn]),
            ];
            all.extend(parts.map(|(part, shape)| (format!("blk.{layer}.{part}"), shape)));
        }
        all.push(("output_norm.weight".to_owned(), [1, self.width]));
        if !self.tied {
            all.push(("output.weight".to_owned(), [self.vocab, self.width]));
        }
        all
    }

    /// A byte-level vocabulary: all bytes, and names for what is left.
    fn vocabulary(&self, w: &mut GgufWriter) {
        let mut tokens: Vec<String> = vec!["<|endoftext|>".into()];
        let mut next = 0x100;
        for byte in 0..256u32 {
            let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            tokens.extend(char::from_u32(if printable { byte } else { next }).map(String::from));
            next += u32::from(!printable);
        }
        tokens.extend((tokens.len()..self.vocab).map(|i| format!("t{i}")));
        let kinds: Vec<i32> = (0..tokens.len()).map(|i| if i == 0 { 3 } else { 1 }).collect();
        w.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
        w.texts("tokenizer.ggml.tokens", &tokens).i32s("tokenizer.ggml.token_type", &kinds);
        w.texts("tokenizer.ggml.merges", &["h e"]).u32("tokenizer.ggml.eos_token_id", 0);
    }
}
