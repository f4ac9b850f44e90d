//! CPU interpreter of rule files: runs each operation over 64 cells at a time, with its result in registers for the
//! next one. Results needed later go to a small scratch buffer that stays in the L1 cache.
#![expect(clippy::wildcard_enum_match_arm, reason = "a few of many operations have forms of their own")]
use kernels::cpu::Isa;
use kernels::cpu::simd::{Kernel, Simd};
use kernels::planes::{Planes, Shared};

use super::TextRule;
use super::program::{Operation, Value};
use crate::frame::Frame;
use crate::ghosts;
use crate::stepper::{Rows, Stepper, aligned_frame};

/// States larger than this, in bytes, are written with non-temporal stores.
const STREAM: usize = 16 << 20;
/// Prefetch distance in cells: hardware prefetchers stop at page boundaries.
const AHEAD: isize = 256;
/// Cells per vector.
const LANES: usize = 16;
/// Vectors per block: leaves room for operands in 16 registers of half a vector each.
const VECTORS: usize = 4;
const CELLS: usize = LANES * VECTORS;

/// A rule prepared for one tile.
pub(crate) struct Interpreter {
    steps: Vec<Step>,
    /// Constants, parameters, and values computed from them alone.
    numbers: Vec<Row>,
    /// Number of scratch rows.
    rows: usize,
    fields: usize,
    /// By field, whether it is read at offset 0 only.
    alone: Vec<bool>,
    corners: bool,
    stream: bool,
    /// By field, the largest offset read, in elements: where to prefetch.
    newest: Vec<isize>,
}

/// One operation over all cells of a row.
#[derive(Clone, Copy)]
struct Step {
    code: Code,
    operands: [Place; 3],
}

/// Operation codes. In arithmetic names, `R` is the previous step's result in registers and `M` an operand in memory.
#[derive(Clone, Copy, Debug)]
enum Code {
    AddMM,
    AddRM,
    SubtractMM,
    SubtractRM,
    SubtractMR,
    MultiplyMM,
    MultiplyRM,
    MultiplyAddMMM,
    MultiplyAddRMM,
    MultiplyAddMMR,
    /// Any other operation, with operands in memory.
    Other(Operation),
    /// Memory to registers.
    Load,
    /// Registers to scratch.
    Keep,
    /// Registers to the next state.
    Next,
}

/// A location in memory.
#[derive(Clone, Copy)]
enum Place {
    /// A field, at an offset from the cell in elements.
    Field(u16, isize),
    /// A scratch row.
    Row(u16),
    Number(u16),
    /// A field's next state.
    Next(u16),
}

#[derive(Clone, Copy)]
#[repr(align(64))]
struct Row([f32; CELLS]);

impl Interpreter {
    pub(crate) fn new(rule: &TextRule, frame: &Frame) -> Self {
        let program = rule.program();
        let fields = program.fields().len();
        let lowered = Lowering::run(rule, frame.strides());
        let alone: Vec<bool> = (0..fields).map(|field| program.is_pointwise(field)).collect();
        Self {
            steps: lowered.steps,
            numbers: lowered.numbers.iter().map(|&number| Row([number; CELLS])).collect(),
            rows: lowered.rows,
            fields,
            // If no field is read at an offset, tiles must still exchange halos to advance together.
            alone: if alone.contains(&false) { alone } else { vec![false; fields] },
            corners: program.reads_diagonals(),
            stream: 2 * fields * frame.plane_bytes() > STREAM,
            newest: lowered.newest,
        }
    }
}

/// Lowers operations to steps.
struct Lowering {
    strides: [isize; 2],
    /// By operation, the location of its result.
    places: Vec<Place>,
    /// By operation, its value if it is the same in all cells.
    known: Vec<Option<f32>>,
    /// By operation, the number of remaining reads from memory.
    reads: Vec<usize>,
    free: Vec<u16>,
    rows: usize,
    numbers: Vec<f32>,
    newest: Vec<isize>,
    steps: Vec<Step>,
}

impl Lowering {
    fn run(rule: &TextRule, strides: [isize; 2]) -> Self {
        let program = rule.program();
        let (operations, next) = (program.operations(), program.next());
        let mut lowering = Self {
            strides,
            places: Vec::new(),
            known: Vec::new(),
            reads: vec![0; operations.len()],
            free: Vec::new(),
            rows: 0,
            numbers: vec![0.0],
            newest: vec![0; program.fields().len()],
            steps: Vec::new(),
        };
        operations.iter().flat_map(Operation::operands).for_each(|value| lowering.reads[usize::from(value)] += 1);
        lowering.settle(operations, rule.parameters());
        let computed: Vec<usize> = (0..operations.len())
            .filter(|&at| lowering.known[at].is_none() && !matches!(operations[at], Operation::Load { .. }))
            .collect();
        let mut held = None;
        for (number, &at) in computed.iter().enumerate() {
            lowering.compute(operations[at], held);
            let fields = next.iter().enumerate().filter(|(_, value)| usize::from(**value) == at);
            fields.for_each(|(field, _)| lowering.push(Code::Next, [Place::Next(field as u16); 3]));
            held = Some(at as Value);
            let taken = computed.get(number + 1).is_some_and(|&after| Form::of(operations[after], held).takes);
            lowering.reads[at] -= usize::from(taken);
            if lowering.reads[at] > 0 {
                lowering.keep(at);
            }
        }
        for (field, &value) in next.iter().enumerate().filter(|(_, value)| !computed.contains(&usize::from(**value))) {
            lowering.push(Code::Load, [lowering.places[usize::from(value)]; 3]);
            lowering.push(Code::Next, [Place::Next(field as u16); 3]);
        }
        lowering
    }

    /// Assigns locations to everything that is not computed per cell: loads, constants and parameters.
    fn settle(&mut self, operations: &[Operation], parameters: &[f32]) {
        for operation in operations {
            let operands: Vec<_> = operation.operands().map(|value| self.known[usize::from(value)]).collect();
            let operand = |at: usize| operands.get(at).copied().flatten().unwrap_or(0.0);
            let mut place = Place::Number(0);
            let known = match *operation {
                Operation::Load { field, offset: [x, y, z] } => {
                    let [row, layer] = self.strides;
                    let shift = isize::from(x) + isize::from(y) * row + isize::from(z) * layer;
                    let newest = &mut self.newest[usize::from(field)];
                    *newest = shift.max(*newest);
                    place = Place::Field(field, shift);
                    None
                }
                Operation::Parameter(which) => Some(parameters[usize::from(which)]),
                _ if operands.iter().all(Option::is_some) => Some(operation.of(operand(0), operand(1), operand(2))),
                _ => None,
            };
            if let Some(number) = known {
                place = Place::Number(self.numbers.len() as u16);
                self.numbers.push(number);
            }
            self.places.push(place);
            self.known.push(known);
        }
    }

    fn compute(&mut self, operation: Operation, held: Option<Value>) {
        let Form { code, operands, .. } = Form::of(operation, held);
        let place = |operand: Option<Value>| operand.map_or(Place::Number(0), |value| self.places[usize::from(value)]);
        self.push(code, operands.map(place));
        for value in operands.into_iter().flatten() {
            let reads = &mut self.reads[usize::from(value)];
            *reads -= 1;
            if let (0, Place::Row(row)) = (*reads, self.places[usize::from(value)]) {
                self.free.push(row);
            }
        }
    }

    /// Spills a result to scratch for later readers.
    fn keep(&mut self, at: usize) {
        let row = self.free.pop().unwrap_or_else(|| {
            self.rows += 1;
            (self.rows - 1) as u16
        });
        self.places[at] = Place::Row(row);
        self.push(Code::Keep, [Place::Row(row); 3]);
    }

    fn push(&mut self, code: Code, operands: [Place; 3]) {
        self.steps.push(Step { code, operands });
    }
}

/// The form of an operation, given the value that registers hold.
struct Form {
    code: Code,
    /// Operands read from memory.
    operands: [Option<Value>; 3],
    /// Whether it consumes the value in registers.
    takes: bool,
}

impl Form {
    fn of(operation: Operation, held: Option<Value>) -> Self {
        let is = |value: Value| held == Some(value);
        let memory = |code, operands| Self { code, operands, takes: false };
        let takes = |code, operands| Self { code, operands, takes: true };
        match operation {
            Operation::Add(x, y) | Operation::Add(y, x) if is(x) && !is(y) => takes(Code::AddRM, [Some(y), None, None]),
            Operation::Add(x, y) => memory(Code::AddMM, [Some(x), Some(y), None]),
            Operation::Subtract(x, y) if is(x) && !is(y) => takes(Code::SubtractRM, [Some(y), None, None]),
            Operation::Subtract(x, y) if is(y) && !is(x) => takes(Code::SubtractMR, [Some(x), None, None]),
            Operation::Subtract(x, y) => memory(Code::SubtractMM, [Some(x), Some(y), None]),
            Operation::Multiply(x, y) | Operation::Multiply(y, x) if is(x) && !is(y) => {
                takes(Code::MultiplyRM, [Some(y), None, None])
            }
            Operation::Multiply(x, y) => memory(Code::MultiplyMM, [Some(x), Some(y), None]),
            Operation::MultiplyAdd(x, y, z) | Operation::MultiplyAdd(y, x, z) if is(x) && !is(y) && !is(z) => {
                takes(Code::MultiplyAddRMM, [Some(y), Some(z), None])
            }
            Operation::MultiplyAdd(x, y, z) if is(z) && !is(x) && !is(y) => {
                takes(Code::MultiplyAddMMR, [Some(x), Some(y), None])
            }
            Operation::MultiplyAdd(x, y, z) => memory(Code::MultiplyAddMMM, [Some(x), Some(y), Some(z)]),
            other => {
                let mut operands = other.operands();
                memory(Code::Other(other), [operands.next(), operands.next(), operands.next()])
            }
        }
    }
}

impl Stepper for Interpreter {
    fn fill(&self, frame: &Frame, state: &mut Planes, _steps: usize) {
        for field in (0..self.fields).filter(|&field| !self.alone[field]) {
            ghosts::fill(frame, state.plane_mut::<f32>(field), field, self.corners);
        }
    }

    unsafe fn rows(&self, isa: Isa, frame: &Frame, state: &Planes, next: Shared<'_>, rows: &Rows) {
        let (start, end) = (rows.x.start.div_euclid(16) * 16, (rows.x.end + 15).div_euclid(16) * 16);
        let at = frame.at([start, rows.y.start, rows.z]);
        let mut scratch = vec![Row([0.0; CELLS]); self.rows];
        let scratch = scratch.as_mut_ptr();
        let steps: Vec<Ready> = self.steps.iter().map(|step| self.ready(*step, state, next, scratch, at)).collect();
        let soon =
            |field: usize| state.plane::<f32>(field).as_ptr().wrapping_offset(at as isize + self.newest[field] + AHEAD);
        let part = Part {
            steps: &steps,
            ahead: &(0..if self.stream { self.fields } else { 0 }).map(soon).collect::<Vec<_>>(),
            stride: frame.strides()[0] as usize,
            rows: rows.y.len(),
            vectors: (end - start) as usize / LANES,
        };
        // SAFETY: blocks and their stencil radius lie in the planes by the caller's contract and the padding of rows;
        // each step accesses only allocated scratch rows; the instruction set was detected.
        unsafe { if self.stream { isa.run(Walk::<true>(part)) } else { isa.run(Walk::<false>(part)) } }
    }

    fn streaming_direction(&self, field: usize) -> Option<[i8; 3]> {
        // A field read at offset 0 only is needed just where cells are computed, like a field that does not stream.
        self.alone[field].then_some([0; 3])
    }
}

impl Interpreter {
    /// A step with pointers for rows that begin at element `at`.
    fn ready(&self, step: Step, state: &Planes, next: Shared<'_>, scratch: *mut Row, at: usize) -> Ready {
        let operands = step.operands.map(|place| match place {
            Place::Field(field, shift) => Operand {
                from: state
                    .plane::<f32>(usize::from(field))
                    .as_ptr()
                    .wrapping_add(at)
                    .wrapping_offset(shift)
                    .cast_mut(),
                moves: usize::MAX,
            },
            Place::Next(field) => {
                Operand { from: next.start::<f32>(usize::from(field)).wrapping_add(at), moves: usize::MAX }
            }
            Place::Row(row) => Operand { from: scratch.wrapping_add(usize::from(row)).cast(), moves: 0 },
            Place::Number(number) => {
                Operand { from: self.numbers[usize::from(number)].0.as_ptr().cast_mut(), moves: 0 }
            }
        });
        Ready { code: step.code, operands }
    }
}

struct Ready {
    code: Code,
    operands: [Operand; 3],
}

/// An operand's address for the first cell.
#[derive(Clone, Copy)]
struct Operand {
    from: *mut f32,
    /// Mask of the cell offset: all bits set if the address moves with the cell, else 0.
    moves: usize,
}

impl Operand {
    #[inline(always)]
    unsafe fn at(self, cell: usize) -> *mut f32 {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe { self.from.add(cell & self.moves) }
    }

    /// Loads `N` vectors.
    #[inline(always)]
    unsafe fn load<S: Simd, const N: usize>(self, cell: usize) -> [S::F; N] {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            let from = self.at(cell);
            let mut vectors = [S::splat(0.0); N];
            for (i, vector) in vectors.iter_mut().enumerate() {
                *vector = S::load(from.add(i * LANES));
            }
            vectors
        }
    }
}

struct Part<'a> {
    steps: &'a [Ready],
    /// By field, the prefetch address; empty if the state fits the caches.
    ahead: &'a [*const f32],
    stride: usize,
    rows: usize,
    /// Vectors per row.
    vectors: usize,
}

struct Walk<'a, const STREAM: bool>(Part<'a>);

impl<const STREAM: bool> Kernel for Walk<'_, STREAM> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let part = self.0;
        aligned_frame();
        // SAFETY: the contract of `Stepper::rows`, passed on.
        unsafe {
            for row in 0..part.rows {
                let mut done = 0;
                while done + VECTORS <= part.vectors {
                    part.cells::<S, VECTORS, STREAM>(row * part.stride + done * LANES);
                    done += VECTORS;
                }
                while done < part.vectors {
                    part.cells::<S, 1, STREAM>(row * part.stride + done * LANES);
                    done += 1;
                }
            }
            if STREAM {
                S::fence();
            }
        }
    }
}

/// Applies a SIMD function to each vector. A loop, because closures are not compiled for the instruction set.
macro_rules! each {
    ($function:ident($($operand:ident),+)) => {{
        let mut result = [S::splat(0.0); N];
        for i in 0..N {
            result[i] = S::$function($($operand[i]),+);
        }
        result
    }};
}

impl Part<'_> {
    #[inline(always)]
    unsafe fn cells<S: Simd, const N: usize, const STREAM: bool>(&self, cell: usize) {
        // SAFETY: the contract of `Stepper::rows`.
        unsafe {
            for ahead in self.ahead {
                for i in 0..N {
                    S::prefetch(ahead.wrapping_add(cell + i * LANES).cast());
                }
            }
            let mut held = [S::splat(0.0); N];
            for step in self.steps {
                let [a, b, c] = step.operands;
                held = match step.code {
                    Code::AddMM => {
                        let (a, b) = (a.load::<S, N>(cell), b.load::<S, N>(cell));
                        each!(add(a, b))
                    }
                    Code::AddRM => {
                        let a = a.load::<S, N>(cell);
                        each!(add(held, a))
                    }
                    Code::SubtractMM => {
                        let (a, b) = (a.load::<S, N>(cell), b.load::<S, N>(cell));
                        each!(sub(a, b))
                    }
                    Code::SubtractRM => {
                        let a = a.load::<S, N>(cell);
                        each!(sub(held, a))
                    }
                    Code::SubtractMR => {
                        let a = a.load::<S, N>(cell);
                        each!(sub(a, held))
                    }
                    Code::MultiplyMM => {
                        let (a, b) = (a.load::<S, N>(cell), b.load::<S, N>(cell));
                        each!(mul(a, b))
                    }
                    Code::MultiplyRM => {
                        let a = a.load::<S, N>(cell);
                        each!(mul(held, a))
                    }
                    Code::MultiplyAddMMM => {
                        let (a, b, c) = (a.load::<S, N>(cell), b.load::<S, N>(cell), c.load::<S, N>(cell));
                        each!(fma(a, b, c))
                    }
                    Code::MultiplyAddRMM => {
                        let (a, b) = (a.load::<S, N>(cell), b.load::<S, N>(cell));
                        each!(fma(held, a, b))
                    }
                    Code::MultiplyAddMMR => {
                        let (a, b) = (a.load::<S, N>(cell), b.load::<S, N>(cell));
                        each!(fma(a, b, held))
                    }
                    Code::Other(operation) => other::<S, N>(operation, [a.at(cell), b.at(cell), c.at(cell)]),
                    Code::Load => a.load::<S, N>(cell),
                    Code::Keep | Code::Next => {
                        let to = a.at(cell);
                        for (i, vector) in held.iter().enumerate() {
                            if STREAM && matches!(step.code, Code::Next) {
                                S::stream(*vector, to.add(i * LANES));
                            } else {
                                S::store(*vector, to.add(i * LANES));
                            }
                        }
                        held
                    }
                };
            }
        }
    }
}

/// Operations that [`Simd`] lacks: each is a loop over the lanes of a vector, specialised to a constant operation.
macro_rules! lanes {
    ($operation:expr, $operands:expr; $($variant:ident($($operand:tt),+)),+) => {
        match $operation {
            $(Operation::$variant(..) => {
                let operation = Operation::$variant($(0 * $operand),+);
                let mut held = [S::splat(0.0); N];
                for (i, held) in held.iter_mut().enumerate() {
                    let (mut operands, mut result) = ([[0.0; LANES]; 3], [0.0; LANES]);
                    $(operands[$operand] = $operands[$operand].add(i * LANES).cast::<[f32; LANES]>().read_unaligned();)+
                    for lane in 0..LANES {
                        result[lane] = operation.of(operands[0][lane], operands[1][lane], operands[2][lane]);
                    }
                    *held = S::load(result.as_ptr());
                }
                held
            })+
            _ => [S::splat(0.0); N],
        }
    };
}

#[inline(always)]
unsafe fn other<S: Simd, const N: usize>(operation: Operation, operands: [*mut f32; 3]) -> [S::F; N] {
    // SAFETY: the contract of `Stepper::rows`: `N` vectors of each operand are readable.
    unsafe {
        lanes!(operation, operands;
            Divide(0, 1), Negate(0), Absolute(0), SquareRoot(0), Exponential(0), Floor(0), Minimum(0, 1), Maximum(0, 1),
            Less(0, 1), LessEqual(0, 1), Equal(0, 1), And(0, 1), Or(0, 1), Not(0), Select(0, 1, 2))
    }
}
