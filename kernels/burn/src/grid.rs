//! Oracle for grid kernels: each built-in rule as a few burn tensor operations, slow but correct on any backend.
//!
//! To prototype a rule, start with [`Around`].
use bimm_contracts::assert_shape_contract;
use burn::tensor::backend::Backend;
use burn::tensor::{Bool, Tensor, TensorData};
use kernels_grids::lbm::{Collision, LatticeFluid};
use kernels_grids::life::Life;
use kernels_grids::rule::Rule;
use kernels_grids::rule_file::FIELDS_MAX;
use kernels_grids::{CellMap, Face, Grid};

/// A field of a grid: `[z, y, x]`, x innermost.
pub type Field<B> = Tensor<B, 3>;

/// The stencil neighbourhood of every cell of a field.
#[derive(Clone, Debug)]
pub struct Around<B: Backend> {
    /// `[z, y, x]` of the cell, then `[z, y, x]` within its neighbourhood.
    windows: Tensor<B, 6>,
    radius: [usize; 3],
}

impl<B: Backend> Around<B> {
    /// The neighbourhood of each cell up to `radius` cells away. Ghost cells follow the boundary condition of each face: periodic,
    /// mirrored, or the fixed value of field `number`.
    ///
    /// # Panics
    /// If the grid is smaller than the radius.
    pub fn new(grid: &Grid, field: &Field<B>, number: usize, radius: usize) -> Self {
        let mut padded = field.clone();
        let mut radii = [0; 3];
        for (axis, reach) in radii.iter_mut().enumerate().take(grid.dimensions()) {
            let (dim, cells) = (2 - axis, grid.size()[axis]);
            *reach = radius;
            let part = |start: usize| padded.clone().narrow(dim, start, radius);
            let first = part(0);
            let ghosts = |face: Face, mirror: usize, other: usize| match face {
                Face::Periodic => part(other),
                Face::Fixed(values) => first.zeros_like() + values[number],
                Face::Wall | Face::Moving { .. } | Face::Inlet { .. } | Face::Outlet { .. } => {
                    part(mirror).flip([dim as isize])
                }
            };
            let [low, high] = grid.faces(axis);
            let (low, high) = (ghosts(low, 0, cells - radius), ghosts(high, cells - radius, 0));
            padded = Tensor::cat(vec![low, padded, high], dim);
        }
        let [x, y, z] = radii.map(|radius| 2 * radius + 1);
        let windows: Tensor<B, 4> = padded.unfold(0, z, 1);
        let windows: Tensor<B, 5> = windows.unfold(1, y, 1);
        Self { windows: windows.unfold(2, x, 1), radius: radii }
    }

    /// The field shifted by an offset: for each cell, its neighbour at `offset` along x, y and z.
    pub fn at(&self, offset: [i8; 3]) -> Field<B> {
        let [depth, height, width, ..] = self.windows.dims();
        let place = |axis: usize| {
            let place = self.radius[axis].wrapping_add_signed(offset[axis].into());
            place..place + 1
        };
        let seen = self.windows.clone().slice([0..depth, 0..height, 0..width, place(2), place(1), place(0)]);
        seen.reshape([depth, height, width])
    }

    /// The sum over each cell's neighbourhood, including the cell.
    pub fn sum(&self) -> Field<B> {
        let [depth, height, width, z, y, x] = self.windows.dims();
        let windows: Tensor<B, 4> = self.windows.clone().reshape([depth, height, width, z * y * x]);
        windows.sum_dim(3).reshape([depth, height, width])
    }

    /// The Laplacian: the sum of the neighbours along the axes, minus their number times the cell.
    pub fn laplacian(&self) -> Field<B> {
        let mut sum = self.at([0; 3]).zeros_like();
        for axis in (0..3).filter(|&axis| self.radius[axis] > 0) {
            let mut step = [0; 3];
            step[axis] = 1;
            sum = sum + self.at(step) + self.at(step.map(|step: i8| -step)) - self.at([0; 3]) * 2.0;
        }
        sum
    }
}

/// Advances all fields by one step.
///
/// # Errors
/// The rule does not fit the grid, or has no version here: text rules, and fluids with faces other than periodic and walls.
///
/// # Panics
/// If a field has another size than the grid.
pub fn step<B: Backend>(grid: &Grid, rule: &Rule, fields: &[Field<B>]) -> Result<Vec<Field<B>>, String> {
    rule.check(grid).map_err(|error| error.to_string())?;
    let [x, y, z] = grid.size();
    for field in fields {
        assert_shape_contract!(["z", "y", "x"], &field.dims(), &[("z", z), ("y", y), ("x", x)]);
    }
    let around = |number: usize| Around::new(grid, &fields[number], number, 1);
    let cell = |number: usize| fields[number].clone();
    let missing = || Err(format!("{} has no version in tensor operations", rule.name()));
    match rule {
        Rule::Life(rule) => Ok(vec![life(grid, *rule, &fields[0])]),
        Rule::Heat(heat) => Ok(vec![cell(0) + around(0).laplacian() * heat.rate]),
        Rule::Wave(wave) => {
            let next = cell(0) * 2.0 - cell(1) + around(0).laplacian() * (wave.speed * wave.speed);
            Ok(vec![next, cell(0)])
        }
        Rule::GrayScott(rule) => {
            let (u, v) = (cell(0), cell(1));
            let reaction = u.clone() * v.clone() * v.clone();
            let fed = (-u.clone() + 1.0) * rule.feed - reaction.clone();
            let lost = reaction - v.clone() * (rule.feed + rule.kill);
            let spread = |number: usize| around(number).laplacian() * rule.diffusion[number];
            Ok(vec![u + spread(0) + fed, v + spread(1) + lost])
        }
        Rule::D2q9(rule) => flow(grid, rule, fields),
        Rule::D3q19(rule) => flow(grid, rule, fields),
        Rule::Text(_) => missing(),
    }
}

fn life<B: Backend>(grid: &Grid, rule: Life, alive: &Field<B>) -> Field<B> {
    // Walls have dead ghost cells.
    let faces = [0, 1, 2].map(|axis| {
        grid.faces(axis).map(|face| if face == Face::Wall { Face::Fixed([0.0; FIELDS_MAX]) } else { face })
    });
    let grid =
        Grid::new(&grid.size()[..grid.dimensions()], &faces[..grid.dimensions()]).unwrap_or_else(|_| grid.clone());
    let living = Around::new(&grid, alive, 0, 1).sum() - alive.clone();
    let text = rule.to_string();
    let (birth, survival) = text.split_once('/').unwrap_or_default();
    let any = |digits: &str| {
        let counts = digits.chars().filter_map(|digit| digit.to_digit(10));
        counts.fold(alive.zeros_like(), |any, count| any + living.clone().equal_elem(count).float())
    };
    any(birth) * (-alive.clone() + 1.0) + any(survival) * alive.clone()
}

/// Lattice Boltzmann step: pull streaming, then collision.
fn flow<B: Backend, const D: usize>(
    grid: &Grid,
    fluid: &LatticeFluid<D>,
    fields: &[Field<B>],
) -> Result<Vec<Field<B>>, String> {
    for face in (0..D).flat_map(|axis| grid.faces(axis)) {
        if !matches!(face, Face::Periodic | Face::Wall | Face::Moving { .. }) {
            return Err(format!("{face:?} has no version in tensor operations"));
        }
    }
    let directions = directions(D);
    let device = fields[0].device();
    let opposite = |c: [i8; 3]| {
        let back = c.map(|c| -c);
        directions.iter().position(|(other, _)| *other == back).unwrap_or(0)
    };
    // Walls have solid ghost cells.
    let ghosts = [0, 1, 2].map(|axis| {
        grid.faces(axis).map(|face| if face == Face::Periodic { face } else { Face::Fixed([1.0; FIELDS_MAX]) })
    });
    let walled = Grid::new(&grid.size()[..D], &ghosts[..D]).map_err(|error| error.to_string())?;
    let is_solid = |at| fluid.solid.as_ref().is_some_and(|solid: &CellMap<bool>| solid(at));
    let solid = map(grid, &device, |at| f32::from(u8::from(is_solid(at))));
    let solid = Around::new(&walled, &solid, 0, 1);
    let pulled = |(i, (c, w)): (usize, &([i8; 3], f64))| {
        let from = c.map(|c| -c);
        let wall: Tensor<B, 3, Bool> = solid.at(from).greater_elem(0.5);
        Around::new(grid, &fields[i], 0, 1)
            .at(from)
            .mask_where(wall, fields[opposite(*c)].clone() + wall_momentum(grid, &device, *c, *w))
    };
    let f: Vec<Field<B>> = directions.iter().enumerate().map(pulled).collect();
    let zero = || f[0].zeros_like();
    let density = f.iter().fold(zero() + 1.0, |sum, f| sum + f.clone());
    let velocity: Vec<Field<B>> = (0..D)
        .map(|axis| {
            let parts = f.iter().zip(&directions).filter(|(_, (c, _))| c[axis] != 0);
            let momentum = parts.fold(zero(), |sum, (f, (c, _))| sum + f.clone() * f32::from(c[axis]));
            (momentum + 0.5 * fluid.force[axis]) / density.clone()
        })
        .collect();
    let dot = |c: [i8; 3]| {
        (0..D).filter(|&axis| c[axis] != 0).fold(zero(), |sum, axis| sum + velocity[axis].clone() * f32::from(c[axis]))
    };
    let square = velocity.iter().fold(zero(), |sum, u| sum + u.clone() * u.clone());
    let work = velocity.iter().zip(fluid.force).fold(zero(), |sum, (u, force)| sum + u.clone() * force);
    let [even_rate, odd_rate] = rates(grid, &device, fluid);
    let next = directions.iter().enumerate().map(|(i, (c, w))| {
        let (along, back) = (dot(*c), f[opposite(*c)].clone());
        let (even, odd) = ((f[i].clone() + back.clone()) * 0.5, (f[i].clone() - back) * 0.5);
        let curved = along.clone() * along.clone() * 4.5 - square.clone() * 1.5;
        let even_rest = (density.clone() - 1.0 + density.clone() * curved) * (*w as f32);
        let odd_rest = density.clone() * along.clone() * (3.0 * w) as f32;
        let push: f32 = (0..D).map(|axis| f32::from(c[axis]) * fluid.force[axis]).sum();
        let even_push = (along * (9.0 * push) - work.clone() * 3.0) * (*w as f32);
        let odd_push = 3.0 * *w as f32 * push;
        f[i].clone() - even_rate.clone() * (even - even_rest) - odd_rate.clone() * (odd - odd_rest)
            + (-even_rate.clone() * 0.5 + 1.0) * even_push
            + (-odd_rate.clone() * 0.5 + 1.0) * odd_push
    });
    Ok(next.collect())
}

/// Momentum that a moving wall adds to a population bouncing back into direction `c` with weight `w`. Zero where walls meet.
fn wall_momentum<B: Backend>(grid: &Grid, device: &B::Device, c: [i8; 3], w: f64) -> Field<B> {
    let wall = |at: [usize; 3], axis: usize| match c[axis] {
        1 if at[axis] == 0 => Some(grid.faces(axis)[0]),
        -1 if at[axis] + 1 == grid.size()[axis] => Some(grid.faces(axis)[1]),
        _ => None,
    };
    map(grid, device, |at| {
        let mut walls = (0..3).filter_map(|axis| wall(at, axis)).filter(|face| *face != Face::Periodic);
        let moving = match (walls.next(), walls.next()) {
            (Some(Face::Moving { velocity }), None) => Some(velocity),
            _ => None,
        };
        let along = |velocity: [f32; 3]| c.iter().zip(velocity).map(|(c, u)| f64::from(*c) * f64::from(u)).sum::<f64>();
        moving.map_or(0.0, |velocity| (6.0 * w * along(velocity)) as f32)
    })
}

/// Relaxation rates of the even and odd parts (TRT), per cell.
fn rates<B: Backend, const D: usize>(grid: &Grid, device: &B::Device, fluid: &LatticeFluid<D>) -> [Field<B>; 2] {
    let tau = |at| fluid.omega.as_ref().map_or(fluid.tau, |omega: &CellMap<f32>| 1.0 / f64::from(omega(at)));
    let odd = |tau: f64| match fluid.collision {
        Collision::Bgk => tau,
        Collision::Trt { magic } => magic / (tau - 0.5) + 0.5,
    };
    [map(grid, device, |at| 1.0 / tau(at) as f32), map(grid, device, |at| 1.0 / odd(tau(at)) as f32)]
}

/// A field computed from the `[x, y, z]` of each cell.
pub fn map<B: Backend>(grid: &Grid, device: &B::Device, cell: impl Fn([usize; 3]) -> f32) -> Field<B> {
    let [width, height, depth] = grid.size();
    let places = (0..depth * height * width).map(|i| [i % width, i / width % height, i / width / height]);
    Tensor::from_data(TensorData::new(places.map(cell).collect::<Vec<f32>>(), [depth, height, width]), device)
}

/// Lattice directions with their weights, in the order of the kernels' fields.
fn directions(dimensions: usize) -> Vec<([i8; 3], f64)> {
    let weight = |[x, y, z]: [i8; 3]| match (dimensions, x.abs() + y.abs() + z.abs()) {
        (2, 0) => 4.0 / 9.0,
        (2, 1) => 1.0 / 9.0,
        (_, 0) => 1.0 / 3.0,
        (3, 1) => 1.0 / 18.0,
        _ => 1.0 / 36.0,
    };
    let mut all = vec![[0; 3]];
    if dimensions == 2 {
        all.extend([[1, 0, 0], [0, 1, 0], [-1, 0, 0], [0, -1, 0], [1, 1, 0], [-1, 1, 0], [-1, -1, 0], [1, -1, 0]]);
    } else {
        let firsts =
            [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [1, 0, 1], [0, 1, 1], [1, -1, 0], [1, 0, -1], [0, 1, -1]];
        all.extend(firsts.into_iter().flat_map(|c: [i8; 3]| [c, c.map(|c| -c)]));
    }
    all.into_iter().map(|c| (c, weight(c))).collect()
}
