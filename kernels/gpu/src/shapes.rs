//! Common model shapes with random weights, as GGUF files or without a file: for benchmarks and servers without a real model.
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use kernels::quant::{QuantType, random_blocks};
use kernels_models::stage::StageError;
use kernels_models::weights::testing::{GgufWriter, TensorSource};
use kernels_models::weights::{Architecture, ModelFile};

/// Shape of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Name on the command line.
    pub name: &'static str,
    /// Model family; Gemma is not supported.
    pub family: Architecture,
    /// Number of layers.
    pub layers: usize,
    /// Elements of a hidden row.
    pub width: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Hidden elements of the feed-forward network, or of each expert.
    pub ffn: usize,
    /// Experts of a layer, and of a row.
    pub experts: Option<[usize; 2]>,
    /// Tokens of the vocabulary.
    pub vocab: usize,
    /// The output head shares the embedding's weights.
    pub tied: bool,
}

const fn shape(name: &'static str, family: Architecture, dims: [usize; 7], tied: bool) -> Shape {
    let [layers, width, heads, kv_heads, head_dim, ffn, vocab] = dims;
    Shape { name, family, layers, width, heads, kv_heads, head_dim, ffn, experts: None, vocab, tied }
}

const fn mixture(name: &'static str, family: Architecture, dims: [usize; 7], experts: [usize; 2]) -> Shape {
    Shape { experts: Some(experts), ..shape(name, family, dims, false) }
}

/// Shapes of popular models, from their `config.json` files.
pub const SHAPES: [Shape; 14] = [
    shape("qwen2.5-0.5b", Architecture::Qwen2, [24, 896, 14, 2, 64, 4864, 151_936], true),
    shape("qwen2.5-1.5b", Architecture::Qwen2, [28, 1536, 12, 2, 128, 8960, 151_936], true),
    shape("qwen2.5-3b", Architecture::Qwen2, [36, 2048, 16, 2, 128, 11_008, 151_936], true),
    shape("qwen2.5-7b", Architecture::Qwen2, [28, 3584, 28, 4, 128, 18_944, 152_064], false),
    shape("qwen2.5-14b", Architecture::Qwen2, [48, 5120, 40, 8, 128, 13_824, 152_064], false),
    shape("qwen2.5-32b", Architecture::Qwen2, [64, 5120, 40, 8, 128, 27_648, 152_064], false),
    shape("qwen3-8b", Architecture::Qwen3, [36, 4096, 32, 8, 128, 12_288, 151_936], false),
    shape("llama-3.2-1b", Architecture::Llama, [16, 2048, 32, 8, 64, 8192, 128_256], true),
    shape("llama-3.1-8b", Architecture::Llama, [32, 4096, 32, 8, 128, 14_336, 128_256], false),
    shape("llama-3.1-70b", Architecture::Llama, [80, 8192, 64, 8, 128, 28_672, 128_256], false),
    mixture("qwen3-30b-a3b", Architecture::Qwen3Moe, [48, 2048, 32, 4, 128, 768, 151_936], [128, 8]),
    mixture("gpt-oss-20b", Architecture::GptOss, [24, 2880, 64, 8, 64, 2880, 201_088], [32, 4]),
    mixture("gpt-oss-120b", Architecture::GptOss, [36, 2880, 64, 8, 64, 2880, 201_088], [128, 4]),
    mixture("mixtral-8x7b", Architecture::Llama, [32, 4096, 32, 8, 128, 14_336, 32_000], [8, 2]),
];

/// Bytes of random blocks that a matrix repeats: the values do not affect timings.
const PATTERN_BYTES: usize = 1 << 20;

/// Whether a matrix chooses experts. Its rows must differ, so it repeats no pattern.
pub(crate) fn is_router(name: &str) -> bool {
    name.ends_with("ffn_gate_inp.weight")
}

/// Layout of the GGUF file of a shape.
struct Plan {
    /// Everything before the tensors' data.
    header: Vec<u8>,
    tensors: Vec<Planned>,
    /// Length of the whole file.
    len: u64,
}

struct Planned {
    name: String,
    rows: usize,
    /// Bytes in the file.
    range: Range<u64>,
}

impl Planned {
    /// The f32 bytes of a vector, of the biases of all experts, or of a router: zeros for biases, ones for vectors. `None` for other
    /// matrices.
    fn numbers(&self) -> Option<Vec<u8>> {
        let len = (self.range.end - self.range.start) as usize / 4;
        if is_router(&self.name) {
            return Some(random_blocks(QuantType::F32, len, self.range.start));
        }
        let number = if self.name.ends_with("bias") { 0f32 } else { 1f32 };
        (self.rows == 1 || self.name.ends_with("bias")).then(|| number.to_le_bytes().repeat(len))
    }
}

impl Shape {
    /// The shape with this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        SHAPES.into_iter().find(|shape| shape.name == name)
    }

    /// Writes the model with random weights in `quant`; vectors are ones, biases zeros.
    ///
    /// # Errors
    /// The file cannot be written, or the rows are not whole blocks of the format.
    pub fn write(&self, path: &Path, quant: QuantType) -> io::Result<()> {
        let plan = self.plan(quant)?;
        let mut file = BufWriter::with_capacity(1 << 22, File::create(path)?);
        file.write_all(&plan.header)?;
        let pattern = random_blocks(quant, PATTERN_BYTES / quant.block_bytes(), 1);
        let mut at = plan.header.len() as u64;
        for tensor in &plan.tensors {
            file.write_all(&[0; ALIGNMENT as usize][..(tensor.range.start - at) as usize])?;
            at = tensor.range.end;
            if let Some(numbers) = tensor.numbers() {
                file.write_all(&numbers)?;
                continue;
            }
            let mut left = (tensor.range.end - tensor.range.start) as usize;
            while left > 0 {
                let part = left.min(pattern.len());
                file.write_all(&pattern[..part])?;
                left -= part;
            }
        }
        file.flush()
    }

    /// The model as an unlinked sparse file without matrix data, which the loader generates. It takes some MiB of disk space while
    /// it is open.
    ///
    /// # Errors
    /// The rows are not whole blocks of the format, or the temporary folder cannot hold the file.
    pub(crate) fn sketch(&self, quant: QuantType) -> Result<Arc<ModelFile>, StageError> {
        let plan = self.plan(quant).map_err(|error| StageError::Input(error.to_string()))?;
        let folder = std::env::temp_dir();
        let failed = |error: &dyn std::fmt::Display| {
            let folder = folder.display();
            StageError::Device(format!("cannot write the header of {} to {folder}: {error}; set TMPDIR", self.name))
        };
        let (path, file) = temporary(&folder, self.name).map_err(|error| failed(&error))?;
        let written = plan.write_without_matrices(file).map_err(|error| failed(&error));
        let opened = written.and_then(|()| ModelFile::open(&path).map_err(|error| failed(&error)));
        // The open file outlives its name.
        let removed = fs::remove_file(&path).map_err(|error| failed(&error));
        opened.and_then(|file| removed.map(|()| file))
    }

    fn plan(&self, quant: QuantType) -> io::Result<Plan> {
        let mut w = GgufWriter::default();
        let family = self.family.name();
        w.text("general.architecture", family).text("general.name", self.name);
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
            w.u32(&format!("{family}.{key}"), value as u32);
        }
        if let Some([count, used]) = self.experts {
            w.u32(&format!("{family}.expert_count"), count as u32);
            w.u32(&format!("{family}.expert_used_count"), used as u32);
            w.u32(&format!("{family}.expert_feed_forward_length"), self.ffn as u32);
        }
        if self.family == Architecture::GptOss {
            w.u32(&format!("{family}.attention.sliding_window"), 128);
        }
        w.f32(&format!("{family}.attention.layer_norm_rms_epsilon"), 1e-6);
        w.f32(&format!("{family}.rope.freq_base"), 1e6);
        self.vocabulary(&mut w);
        let mut tensors = Vec::new();
        let mut at = 0u64;
        for (name, [rows, cols]) in self.tensors()? {
            let plain = rows == 1 || name.contains("_gate_inp") || name.ends_with("bias");
            let kind = if plain { QuantType::F32 } else { quant };
            let row = kind.row_bytes(cols).ok_or_else(|| {
                let columns = format!("rows of {cols} are not whole blocks of {}", kind.name());
                io::Error::other(format!("{}: {columns}; use another format or shape", self.name))
            })?;
            let dims = match self.experts {
                Some([count, _]) if name.ends_with("_exps.weight") => vec![cols, rows / count, count],
                _ if rows == 1 => vec![cols],
                _ => vec![cols, rows],
            };
            let dims = dims.into_iter().map(|dim| dim as u64).collect();
            let (source, kind) = (name.clone(), kind.ggml_id());
            w.tensors_mut().push(TensorSource { name: source, dims, kind, bytes: Vec::new(), offset: Some(at) });
            tensors.push(Planned { name, rows, range: at..at + (rows * row) as u64 });
            at = (at + (rows * row) as u64).next_multiple_of(ALIGNMENT);
        }
        let header = w.header();
        for tensor in &mut tensors {
            tensor.range.start += header.len() as u64;
            tensor.range.end += header.len() as u64;
        }
        let len = tensors.last().map_or(0, |tensor| tensor.range.end);
        Ok(Plan { header, tensors, len })
    }

    /// Names and shapes of all tensors.
    fn tensors(&self) -> io::Result<Vec<(String, [usize; 2])>> {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let of_family: &[(&str, [usize; 2])] = match self.family {
            Architecture::Llama | Architecture::SmolLm3 | Architecture::Mistral3 => &[],
            Architecture::Qwen2 => &[("attn_q.bias", [1, q]), ("attn_k.bias", [1, kv]), ("attn_v.bias", [1, kv])],
            Architecture::Qwen3 | Architecture::Qwen3Moe => {
                &[("attn_q_norm.weight", [1, self.head_dim]), ("attn_k_norm.weight", [1, self.head_dim])]
            }
            Architecture::GptOss => &[
                ("attn_sinks.weight", [1, self.heads]),
                ("attn_q.bias", [1, q]),
                ("attn_k.bias", [1, kv]),
                ("attn_v.bias", [1, kv]),
                ("attn_output.bias", [1, self.width]),
            ],
            Architecture::Qwen2Moe
            | Architecture::Gemma2
            | Architecture::Gemma3
            | Architecture::Phi3
            | Architecture::Glm4Moe
            | Architecture::Llama4 => {
                let families = "expected a family of llama, qwen2, qwen3, qwen3moe or gpt-oss";
                return Err(io::Error::other(format!("{}: {families}, found {}", self.name, self.family.name())));
            }
        };
        let oss = self.family == Architecture::GptOss;
        let mut all = vec![("token_embd.weight".to_owned(), [self.vocab, self.width])];
        for layer in 0..self.layers {
            let parts = [
                ("attn_norm.weight", [1, self.width]),
                ("attn_q.weight", [q, self.width]),
                ("attn_k.weight", [kv, self.width]),
                ("attn_v.weight", [kv, self.width]),
                ("attn_output.weight", [self.width, q]),
                (if oss { "post_attention_norm.weight" } else { "ffn_norm.weight" }, [1, self.width]),
            ];
            let mut feed_forward = match self.experts {
                None => vec![
                    ("ffn_gate.weight", [self.ffn, self.width]),
                    ("ffn_up.weight", [self.ffn, self.width]),
                    ("ffn_down.weight", [self.width, self.ffn]),
                ],
                Some([count, _]) => vec![
                    ("ffn_gate_inp.weight", [count, self.width]),
                    ("ffn_gate_exps.weight", [count * self.ffn, self.width]),
                    ("ffn_up_exps.weight", [count * self.ffn, self.width]),
                    ("ffn_down_exps.weight", [count * self.width, self.ffn]),
                ],
            };
            if let (true, Some([count, _])) = (oss, self.experts) {
                feed_forward.extend([
                    ("ffn_gate_inp.bias", [1, count]),
                    ("ffn_gate_exps.bias", [count, self.ffn]),
                    ("ffn_up_exps.bias", [count, self.ffn]),
                    ("ffn_down_exps.bias", [count, self.width]),
                ]);
            }
            all.extend(
                parts
                    .iter()
                    .chain(&feed_forward)
                    .chain(of_family)
                    .map(|(part, shape)| (format!("blk.{layer}.{part}"), *shape)),
            );
        }
        all.push(("output_norm.weight".to_owned(), [1, self.width]));
        if !self.tied {
            all.push(("output.weight".to_owned(), [self.vocab, self.width]));
        }
        Ok(all)
    }

    /// Writes a byte-level vocabulary: all bytes, the result of the only merge, and placeholders for the rest.
    fn vocabulary(&self, w: &mut GgufWriter) {
        let mut tokens: Vec<String> = vec!["<|endoftext|>".into()];
        let mut next = 0x100;
        for byte in 0..256u32 {
            let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
            tokens.extend(char::from_u32(if printable { byte } else { next }).map(String::from));
            next += u32::from(!printable);
        }
        tokens.push("he".into());
        tokens.extend((tokens.len()..self.vocab).map(|i| format!("t{i}")));
        let kinds: Vec<i32> = (0..tokens.len()).map(|i| if i == 0 { 3 } else { 1 }).collect();
        w.text("tokenizer.ggml.model", "gpt2").text("tokenizer.ggml.pre", "gpt-2");
        w.texts("tokenizer.ggml.tokens", &tokens).i32s("tokenizer.ggml.token_type", &kinds);
        w.texts("tokenizer.ggml.merges", &["h e"]).u32("tokenizer.ggml.eos_token_id", 0);
    }
}

/// Alignment of tensor offsets: GGUF's default.
const ALIGNMENT: u64 = 32;

impl Plan {
    fn write_without_matrices(&self, mut file: File) -> io::Result<()> {
        file.write_all(&self.header)?;
        for tensor in &self.tensors {
            if let Some(numbers) = tensor.numbers() {
                file.seek(SeekFrom::Start(tensor.range.start))?;
                file.write_all(&numbers)?;
            }
        }
        file.set_len(self.len)
    }
}

/// Creates a new file with a unique name.
fn temporary(folder: &Path, name: &str) -> io::Result<(PathBuf, File)> {
    const TRIES: usize = 64; // a process with the same id may have left files behind
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let mut last = io::Error::other("no name is free");
    for _ in 0..TRIES {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = folder.join(format!("meshnode-{name}-{}-{number}.gguf", std::process::id()));
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(file) => return Ok((path, file)),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => last = error,
            Err(error) => return Err(error),
        }
    }
    Err(last)
}
