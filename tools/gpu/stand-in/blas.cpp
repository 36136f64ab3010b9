// A stand-in for libcublasLt.so.13: products of column-major matrices with sums in f32, and the checks of the real library.
//
// In addition, an operand must be inside an allocation and aligned as the preference promised.
#include "stand_in.hpp"
#include <string>
#include <vector>

/// Values of cublasStatus_t.
enum Status { SUCCESS = 0, INVALID_VALUE = 7, EXECUTION_FAILED = 13, NOT_SUPPORTED = 15 };
/// Values of cudaDataType and cublasComputeType_t.
enum Type { R_32F = 0, R_16BF = 14, COMPUTE_32F = 68 };
/// Attributes of descriptors and preferences.
enum Attribute { LAYOUT_ROWS = 2, LAYOUT_COLS = 3, DESC_TRANSA = 3, DESC_TRANSB = 4, PREF_MAX_WORKSPACE = 1, PREF_MIN_ALIGNMENT_A = 5, PREF_MIN_ALIGNMENT_D = 8 };

struct Layout {
    int type;
    uint64_t rows, cols;
    int64_t ld;
    size_t element() const { return type == R_16BF ? 2 : 4; }
    /// Returns the number of bytes from the first to the last element.
    size_t bytes() const { return ((cols - 1) * uint64_t(ld) + rows) * element(); }
};
struct Descriptor {
    int compute, scale;
    int transposes_a = 0, transposes_b = 0;
};
struct Preference {
    uint64_t workspace = 0;
    /// Alignment in bytes of A, B, C and D.
    uint32_t alignment[4] = {256, 256, 256, 256};
};
/// The first bytes of an algorithm: what its preference promised, and the sizes of C.
struct Algorithm {
    uint64_t workspace;
    uint32_t alignment[4];
    uint64_t rows, cols;
};
/// cublasLtMatmulHeuristicResult_t.
struct Heuristic {
    union {
        uint64_t opaque[8];
        Algorithm promised;
    };
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
};

static int refused(const std::string& why) {
    stand_in_complain(("cuBLASLt: " + why).c_str());
    return INVALID_VALUE;
}

EXPORTED size_t cublasLtGetVersion() { return setting("STAND_IN_CUBLASLT", 130000ull); }

EXPORTED const char* cublasLtGetStatusString(int) { return "a status of the stand-in"; }

EXPORTED int cublasLtCreate(void** handle) {
    static int one;
    *handle = &one;
    return SUCCESS;
}

EXPORTED int cublasLtDestroy(void*) { return SUCCESS; }

EXPORTED int cublasLtMatrixLayoutCreate(void** layout, int type, uint64_t rows, uint64_t cols, int64_t ld) {
    *layout = new Layout{type, rows, cols, ld};
    return SUCCESS;
}

EXPORTED int cublasLtMatrixLayoutSetAttribute(void* handle, int attribute, const void* value, size_t bytes) {
    auto layout = static_cast<Layout*>(handle);
    if (bytes != 8) return refused("an attribute of a layout with " + std::to_string(bytes) + " bytes");
    switch (attribute) {
    case LAYOUT_ROWS: memcpy(&layout->rows, value, 8); return SUCCESS;
    case LAYOUT_COLS: memcpy(&layout->cols, value, 8); return SUCCESS;
    default: return refused("attribute " + std::to_string(attribute) + " of a layout, which the stand-in lacks");
    }
}

EXPORTED int cublasLtMatrixLayoutDestroy(void* layout) {
    delete static_cast<Layout*>(layout);
    return SUCCESS;
}

EXPORTED int cublasLtMatmulDescCreate(void** descriptor, int compute, int scale) {
    *descriptor = new Descriptor{compute, scale};
    return SUCCESS;
}

EXPORTED int cublasLtMatmulDescDestroy(void* descriptor) {
    delete static_cast<Descriptor*>(descriptor);
    return SUCCESS;
}

EXPORTED int cublasLtMatmulDescSetAttribute(void* handle, int attribute, const void* value, size_t bytes) {
    auto descriptor = static_cast<Descriptor*>(handle);
    if (bytes != 4) return refused("an attribute of a descriptor with " + std::to_string(bytes) + " bytes");
    switch (attribute) {
    case DESC_TRANSA: memcpy(&descriptor->transposes_a, value, 4); return SUCCESS;
    case DESC_TRANSB: memcpy(&descriptor->transposes_b, value, 4); return SUCCESS;
    default: return refused("attribute " + std::to_string(attribute) + " of a descriptor, which the stand-in lacks");
    }
}

EXPORTED int cublasLtMatmulPreferenceCreate(void** preference) {
    *preference = new Preference;
    return SUCCESS;
}

EXPORTED int cublasLtMatmulPreferenceDestroy(void* preference) {
    delete static_cast<Preference*>(preference);
    return SUCCESS;
}

EXPORTED int cublasLtMatmulPreferenceSetAttribute(void* handle, int attribute, const void* value, size_t bytes) {
    auto preference = static_cast<Preference*>(handle);
    if (attribute == PREF_MAX_WORKSPACE && bytes == 8) {
        memcpy(&preference->workspace, value, 8);
        return SUCCESS;
    }
    if (attribute >= PREF_MIN_ALIGNMENT_A && attribute <= PREF_MIN_ALIGNMENT_D && bytes == 4) {
        memcpy(&preference->alignment[attribute - PREF_MIN_ALIGNMENT_A], value, 4);
        return SUCCESS;
    }
    return refused("attribute " + std::to_string(attribute) + " of a preference with " + std::to_string(bytes) + " bytes");
}

/// Returns the status of a product with these matrices.
static int check(const Descriptor& op, const Layout& a, const Layout& b, const Layout& c) {
    uint64_t m = op.transposes_a ? a.cols : a.rows, k = op.transposes_a ? a.rows : a.cols;
    uint64_t rows_of_b = op.transposes_b ? b.cols : b.rows, n = op.transposes_b ? b.rows : b.cols;
    if (m != c.rows || n != c.cols || k != rows_of_b)
        return refused("sizes that do not fit: " + std::to_string(m) + "×" + std::to_string(k) + " and " + std::to_string(rows_of_b) + "×" +
                       std::to_string(n) + " give no " + std::to_string(c.rows) + "×" + std::to_string(c.cols));
    if (!m || !n || !k) return refused("a product without elements: " + std::to_string(m) + "×" + std::to_string(n) + "×" + std::to_string(k));
    for (const Layout* layout : {&a, &b, &c})
        if (layout->ld < int64_t(layout->rows)) return refused("a leading dimension of " + std::to_string(layout->ld) + " for " + std::to_string(layout->rows) + " rows");
    if (op.compute != COMPUTE_32F || op.scale != R_32F) return refused("sums that are not f32");
    bool low = a.type == R_16BF && b.type == R_16BF && (c.type == R_16BF || c.type == R_32F);
    bool high = a.type == R_32F && b.type == R_32F && c.type == R_32F;
    return low || high ? SUCCESS : NOT_SUPPORTED;
}

EXPORTED int cublasLtMatmulAlgoGetHeuristic(void*, void* op, void* a, void* b, void* c, void*, void* preference, int wanted, void* results, int* count) {
    *count = 0;
    int status = check(*static_cast<Descriptor*>(op), *static_cast<Layout*>(a), *static_cast<Layout*>(b), *static_cast<Layout*>(c));
    if (status || wanted < 1) return status;
    auto promised = static_cast<Preference*>(preference);
    auto result = static_cast<Heuristic*>(results);
    *result = {};
    result->promised.workspace = promised->workspace;
    memcpy(result->promised.alignment, promised->alignment, sizeof promised->alignment);
    result->promised.rows = static_cast<Layout*>(c)->rows;
    result->promised.cols = static_cast<Layout*>(c)->cols;
    result->workspace = promised->workspace;
    *count = 1;
    stand_in_count("plans", 1);
    return SUCCESS;
}

/// Returns whether an algorithm supports a result of these sizes.
static bool supports(const Algorithm& algorithm, const Layout& c) {
    return (algorithm.rows == c.rows && algorithm.cols == c.cols) || !setting("STAND_IN_EXACT_PLANS", 0ull);
}

EXPORTED int cublasLtMatmulAlgoCheck(void*, void* op, void* a, void* b, void* c, void*, const Algorithm* algorithm, void* result) {
    auto& sizes = *static_cast<Layout*>(c);
    if (int status = check(*static_cast<Descriptor*>(op), *static_cast<Layout*>(a), *static_cast<Layout*>(b), sizes)) return status;
    auto found = static_cast<Heuristic*>(result);
    *found = {};
    found->workspace = algorithm->workspace;
    found->status = supports(*algorithm, sizes) ? SUCCESS : NOT_SUPPORTED;
    return found->status;
}

static float widened(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/// Rounds to the nearest bf16, and a tie to the even one.
static uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

/// A product with copies of everything that a graph has to keep.
struct Product {
    Descriptor op;
    Layout a, b, c;
    const char *at_a, *at_b, *at_c;
    char* at_d;
    float alpha, beta;

    /// Returns a matrix as f32, column by column and without gaps.
    static std::vector<float> dense(const Layout& l, bool transposed, const char* at) {
        uint64_t rows = transposed ? l.cols : l.rows, cols = transposed ? l.rows : l.cols;
        std::vector<float> out(rows * cols);
        for (uint64_t j = 0; j < cols; j++)
            for (uint64_t i = 0; i < rows; i++) {
                uint64_t from = transposed ? i * uint64_t(l.ld) + j : j * uint64_t(l.ld) + i;
                out[j * rows + i] = l.type == R_16BF ? widened(reinterpret_cast<const uint16_t*>(at)[from]) : reinterpret_cast<const float*>(at)[from];
            }
        return out;
    }

    /// Adds the product in the order of `k`, so that every run gives the same bits.
    void run() const {
        auto x = dense(a, op.transposes_a, at_a), y = dense(b, op.transposes_b, at_b);
        uint64_t m = c.rows, n = c.cols, k = y.size() / n;
        std::vector<float> sum(m);
        for (uint64_t j = 0; j < n; j++) {
            std::fill(sum.begin(), sum.end(), 0.0f);
            for (uint64_t p = 0; p < k; p++) {
                float factor = y[j * k + p];
                for (uint64_t i = 0; i < m; i++) sum[i] += x[p * m + i] * factor;
            }
            for (uint64_t i = 0; i < m; i++) {
                uint64_t to = j * uint64_t(c.ld) + i;
                // C may be NaN where beta is 0.
                float term = 0;
                if (beta != 0) term = beta * (c.type == R_16BF ? widened(reinterpret_cast<const uint16_t*>(at_c)[to]) : reinterpret_cast<const float*>(at_c)[to]);
                if (c.type == R_16BF) reinterpret_cast<uint16_t*>(at_d)[to] = rounded(alpha * sum[i] + term);
                else reinterpret_cast<float*>(at_d)[to] = alpha * sum[i] + term;
            }
        }
    }
};

EXPORTED int cublasLtMatmul(void*, void* op, const float* alpha, const void* at_a, void* a, const void* at_b, void* b, const float* beta,
                            const void* at_c, void* c, void* at_d, void* d, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                            void* stream) {
    Product product{*static_cast<Descriptor*>(op), *static_cast<Layout*>(a), *static_cast<Layout*>(b), *static_cast<Layout*>(d),
                    static_cast<const char*>(at_a), static_cast<const char*>(at_b), static_cast<const char*>(at_c), static_cast<char*>(at_d), *alpha, *beta};
    if (int status = check(product.op, product.a, product.b, product.c)) return status;
    if (!supports(*algorithm, product.c)) return refused("an algorithm that does not support these sizes");
    if (c != d) return refused("C and D with two layouts, which the stand-in lacks");
    if (Address(workspace) % 256) return refused("a workspace that is not aligned to 256 bytes");
    if (workspace_bytes && !stand_in_holds(Address(workspace), workspace_bytes)) return refused("a workspace outside of its allocation");
    if (workspace_bytes < algorithm->workspace) return refused("a workspace that is smaller than the preference promised");
    const struct {
        const char* name;
        const void* at;
        const Layout& layout;
        uint32_t alignment;
    } operands[] = {
        {"A", at_a, product.a, algorithm->alignment[0]},
        {"B", at_b, product.b, algorithm->alignment[1]},
        // C is not read where beta is 0.
        {"C", *beta == 0 ? at_d : at_c, product.c, algorithm->alignment[*beta == 0 ? 3 : 2]},
        {"D", at_d, product.c, algorithm->alignment[3]},
    };
    for (auto& operand : operands) {
        std::string name = operand.name;
        if (!stand_in_holds(Address(operand.at), operand.layout.bytes())) return refused(name + " is not inside an allocation");
        if (Address(operand.at) % operand.alignment) return refused(name + " is aligned to less than the promised " + std::to_string(operand.alignment) + " bytes");
    }
    stand_in_count("products", 1);
    // A graph may run the product any number of times, so it is never deleted.
    auto run = [](void* product) { static_cast<Product*>(product)->run(); };
    return stand_in_queue(stream, run, new Product(product)) ? EXECUTION_FAILED : SUCCESS;
}
