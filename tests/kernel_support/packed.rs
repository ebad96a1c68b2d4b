use flint_rs::{tiles::TileFormat, weights::Matrix};

/// The tiles of matrices stacked row on row, and the scale of each half of a strip.
#[derive(Default)]
pub struct Packed {
    pub tiles: Vec<u8>,
    pub scales: Vec<f32>,
}

impl Packed {
    fn add(&mut self, format: TileFormat, rows: [(&Matrix, usize); 16]) {
        let start = self.tiles.len();
        self.tiles.resize(start + format.matrix_bytes(16, rows[0].0.cols).unwrap(), 0xA5);
        let files = rows.map(|(matrix, row)| {
            let len = format.row_bytes(matrix.cols);
            &matrix.data.bytes()[row * len..][..len]
        });
        format.pack_strip(&files, &mut self.tiles[start..]);
        self.scales.extend([rows[0].0.scale(), rows[8].0.scale()]);
    }

    /// Strips of 16 rows of each matrix.
    pub fn plain(format: TileFormat, matrices: &[&Matrix]) -> Self {
        let mut packed = Self::default();
        for matrix in matrices {
            for strip in 0..matrix.rows / 16 {
                packed.add(format, std::array::from_fn(|i| (*matrix, strip * 16 + i)));
            }
        }
        packed
    }

    /// Strips of 8 gate rows and the 8 up rows of the same outputs.
    pub fn gate_up(format: TileFormat, gate: &Matrix, up: &Matrix) -> Self {
        let mut packed = Self::default();
        for strip in 0..gate.rows / 8 {
            let row = |i: usize| (if i < 8 { gate } else { up }, strip * 8 + i % 8);
            packed.add(format, std::array::from_fn(row));
        }
        packed
    }
}
