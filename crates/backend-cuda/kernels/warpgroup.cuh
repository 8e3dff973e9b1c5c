// Tiles of 16-bit elements in shared memory as warpgroups multiply them, and the ring of stages that brings them: what the forward pass has and a
// backward pass will share.
//
// A block of threads owns 128 rows and meets tiles of the other side. Warpgroup 0 copies: one of its threads has the copy engine bring two operands,
// tile by tile, into a ring of stages each. Warpgroups 1 and 2 multiply, 64 own rows each. A stage has two barriers: `full` counts its bytes, `empty` the
// warps that are done with it.
//
// A tile lies in panels of 64 dims: rows of 128 bytes, whose 16-byte chunks change places with the row as the copy engine's swizzle of 128 bytes has
// it. So any eight rows that the units read at once lie in different banks.
//
// Source: Shah et al. 2024 (FlashAttention-3); NVIDIA, PTX ISA, "Shared Memory Matrix Layout", "Matrix Descriptor Format".
#pragma once

#include "tile.cuh"
#include "weights.cuh"

// Rows of the other side a tile. Sums of 256 dims leave less room for products.
#define OTHERS (ANNULUS_DIM <= 128 ? 128 : 64)
#define OWN 64
#define GROUPS 2
#define PANELS (ANNULUS_DIM / 64)
#define STAGES 2
#define PANEL_LINE 64
// Elements of one panel of a tile, and of a tile.
#define OTHER_PANEL (OTHERS * PANEL_LINE)
#define OTHER_TILE (OTHERS * ANNULUS_DIM)
#define OWN_PANEL (OWN * PANEL_LINE)
#define OWN_TILE (OWN * ANNULUS_DIM)
// Dims of one product of sums: two of them make 256.
#define COLUMNS (ANNULUS_DIM < 128 ? ANNULUS_DIM : 128)
#define PRODUCTS (ANNULUS_DIM / COLUMNS)
// Bytes from one group of eight rows to the next.
#define EIGHT_ROWS 1024
// Named barriers: whose turn it is to multiply, and of one warpgroup.
#define TURN_OF(group) (1 + (group))
#define OF_GROUP(group) (3 + (group))

// Mistakes for tests, as tests/emulated/warpgroup.rs numbers them. Each is caught: by wrong numbers, or because the launch fails.
enum Mistake {
    WRONG_PHASE = 1,     // who brings a tile takes a full stage for an empty one
    EARLY_RELEASE,       // a stage of values is given back before it was read
    STAGE_NOT_RELEASED,  // it is not given back
    NO_FULL_WAIT,        // values are used, and their stage given back, before they have come
    FEW_BYTES,           // a phase is told of fewer bytes than come
    NO_COMMIT,           // products belong to no group
    NO_PRODUCT_WAIT,     // products are used while they are made
    NO_PRODUCT_BEGIN,    // registers may not be written yet
    SCALED_IN_FLIGHT,    // sums are scaled while products add to them
    NOT_SHOWN,           // the units are not shown what was stored
    WRONG_SWIZZLE,       // chunks of own rows lie in the wrong places
    WRONG_STEP,          // the next sixteen dims are looked for too near
    WRONG_PANEL,         // the next 64 columns are looked for too near
    MASK_OFF_BY_ONE,
    NO_TURN,             // a warpgroup does not say that it is the other's turn
};

// What kernels of this program are given: mirrored in src/arguments.rs. The first and the second operand of the other side, then the rest.
struct WarpgroupAttention {
    TensorMap first, second;
    Attention attention;
};

// A block's shared memory: mirrored in src/warpgroup.rs, as bytes.
struct BlockMemory {
    u16 own[GROUPS][OWN_TILE];
    u16 first[STAGES][OTHER_TILE], second[STAGES][OTHER_TILE];
    // of each warpgroup: what is rare. A float a product, or its weights and zeros.
    float scratch[GROUPS][OWN * OTHERS];
    Phases first_full[STAGES], first_empty[STAGES], second_full[STAGES], second_empty[STAGES];
};

// A place in the ring of stages. Parity is that of the phases that a user of a full stage waits for.
struct Turn {
    u32 stage, parity;

    METHOD void next() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

// Descriptors of operands in shared memory, by bytes: address, how far the next 64 columns are where they are not summed, how far the next eight
// rows; a swizzle of 128 bytes. A descriptor may begin at any 32 bytes of a row.
DEVICE u64 described(const u16* at, u32 leading, u32 stride) {
    return (shared_address(at) & 0x3ffffu) >> 4 | u64(leading >> 4) << 16 | u64(stride >> 4) << 32 | 1ull << 62;
}
// Rows of dims that are summed.
DEVICE u64 rows_of_dims(const u16* at) { return described(at, 16, EIGHT_ROWS); }
// Summed rows of columns, the next 64 of which begin `panel` elements further.
DEVICE u64 summed_rows(const u16* at, u32 panel) { return described(at, panel * 2, EIGHT_ROWS); }
// Of a descriptor that lies so many elements further.
DEVICE u64 moved(u64 description, u32 elements) { return description + (elements * 2 >> 4); }

// Where element x of a row lies, in a tile whose panels have `rows` rows.
DEVICE u32 place_of(u32 rows, u32 row, u32 x) { return x / 64 * rows * PANEL_LINE + row * PANEL_LINE + ((x / 8 ^ row) % 8 * 8 | x % 8); }

DEVICE void begin_ring(BlockMemory& memory, u32 users) {
    for (u32 stage = 0; stage < STAGES; ++stage) {
        begin_phases(memory.first_full + stage, 1);
        begin_phases(memory.second_full + stage, 1);
        begin_phases(memory.first_empty + stage, users);
        begin_phases(memory.second_empty + stage, users);
    }
    show_phases();
}

// Has one tile brought, when its stage is empty.
DEVICE void bring(u16* to, const TensorMap& map, Phases* full, Phases* empty, const Turn& turn, u32 row, u32 head, u32 batch) {
    wait_for_phase(empty + turn.stage, planted(WRONG_PHASE) ? turn.parity : turn.parity ^ 1);
    arrive_expecting(full + turn.stage, planted(FEW_BYTES) ? OTHER_TILE : OTHER_TILE * 2);
    for (u32 panel = 0; panel < PANELS; ++panel)
        copy_box(to + turn.stage * OTHER_TILE + panel * OTHER_PANEL, map, full + turn.stage, panel * 64, row, head, batch);
}

// Copies a warpgroup's own 64 rows to shared memory, zeros beyond the ends, for the units. Rows are a caller's: any strides.
DEVICE void read_own(u16* to, const Tensor& tensor, u32 b, u32 head, u32 first, u32 rows, u32 dim) {
    u64 at = offset<u16>(tensor, b, 0, head, 0);
    bool aligned = tensor.dim == 1 && at % 16 == 0 && tensor.row % 8 == 0 && dim % 8 == 0;
    for (u32 place = thread_index() % WARPGROUP; place < OWN_TILE / 8; place += WARPGROUP) {
        u32 row = place / (ANNULUS_DIM / 8), x = place % (ANNULUS_DIM / 8) * 8;
        u32 words[4] = {0, 0, 0, 0};
        if (first + row < rows && x < dim) {
            const u16* from = reinterpret_cast<const u16*>(at) + (i64(first + row) * tensor.row + i64(x) * tensor.dim);
            UNROLL for (u32 c = 0; c < 4; ++c) {
                if (aligned) {
                    words[c] = reinterpret_cast<const u32*>(from)[c];
                } else {
                    if (x + 2 * c < dim) words[c] = from[i64(2 * c) * tensor.dim];
                    if (x + 2 * c + 1 < dim) words[c] |= u32(from[i64(2 * c + 1) * tensor.dim]) << 16;
                }
            }
        }
        store_for_units(to + (place_of(OWN, row, x) ^ (planted(WRONG_SWIZZLE) ? row % 2 * 8 : 0)), words);
    }
    if (!planted(NOT_SHOWN)) show_units();
}

DEVICE void multiply_shared(float (&sums)[OTHERS / 2], u64 left, u64 right, bool add) {
#if ANNULUS_DTYPE == 2
    multiply_shared_bf16(sums, left, right, add);
#else
    multiply_shared_f16(sums, left, right, add);
#endif
}

DEVICE void multiply_registers(float (&sums)[COLUMNS / 2], const u32 (&left)[4], u64 right) {
#if ANNULUS_DTYPE == 2
    multiply_registers_bf16(sums, left, right);
#else
    multiply_registers_f16(sums, left, right);
#endif
}

// Begins products ← own·otherᵀ, as a group.
DEVICE void begin_pairs(float (&products)[OTHERS / 2], u64 own, u64 other) {
    UNROLL for (u32 x = 0; x < ANNULUS_DIM; x += 16)
        multiply_shared(products, moved(own, x / 64 * OWN_PANEL + x % 64),
                        moved(other, x / 64 * OTHER_PANEL + (planted(WRONG_STEP) ? x % 64 / 2 : x % 64)), x > 0);
    if (!planted(NO_COMMIT)) end_products();
}

// What weights are multiplied by: `step` elements lie between sixteen rows and the next.
struct Right {
    u64 description;
    u32 panel, step;
};

// Begins sums += weights·right, as a group.
DEVICE void begin_sums(float (&sums)[PRODUCTS][COLUMNS / 2], const u32 (&weights)[OTHERS / 16][4], const Right& right) {
    UNROLL for (u32 y = 0; y < OTHERS / 16; ++y)
        UNROLL for (u32 part = 0; part < PRODUCTS; ++part)
            multiply_registers(sums[part], weights[y], moved(right.description, y * right.step + part * (COLUMNS / 64) * right.panel));
    end_products();
}
