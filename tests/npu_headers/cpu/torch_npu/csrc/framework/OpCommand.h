// Stands in for torch_npu's header of this name where kernels run on the twin.
#pragma once
#include <functional>
#include <string>
#include <vector>

namespace on_twin {

// Launches of a graph: recorded while it is captured, run at each replay.
struct Graph {
    bool capturing = false;
    std::vector<std::function<int()>> launches;
};

inline Graph &TheGraph()
{
    static auto *graph = new Graph;
    return *graph;
}

}  // namespace on_twin

namespace at_npu::native {

struct OpCommand {
    static void RunOpApi(const std::string &name, std::function<int()> launch)
    {
        on_twin::Graph &graph = on_twin::TheGraph();
        if (graph.capturing) {
            graph.launches.push_back(launch);
            return;
        }
        TORCH_CHECK(launch() == 0, name, " failed");
    }
};

}  // namespace at_npu::native
