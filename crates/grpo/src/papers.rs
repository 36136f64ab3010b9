//! Papers that describe a loss, for citation in published models.

use crate::advantage::AdvantageKind;
use crate::loss::{Aggregation, Covariance, LossPlan, RatioLevel, Surrogate};

/// Citation of a paper.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Paper {
    /// Name of the method.
    pub method: &'static str,
    /// Identifier on arXiv.
    pub arxiv: &'static str,
    pub title: &'static str,
    /// First author. The key of the BibTeX entry consists of the author and `year`.
    pub author: &'static str,
    /// Year of the first version.
    pub year: u16,
}

const GRPO: Paper = Paper {
    method: "GRPO",
    arxiv: "2402.03300",
    title: "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models",
    author: "Shao, Zhihong",
    year: 2024,
};
const DR_GRPO: Paper = Paper {
    method: "Dr. GRPO",
    arxiv: "2503.20783",
    title: "Understanding R1-Zero-Like Training: A Critical Perspective",
    author: "Liu, Zichen",
    year: 2025,
};
const DAPO: Paper = Paper {
    method: "DAPO",
    arxiv: "2503.14476",
    title: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
    author: "Yu, Qiying",
    year: 2025,
};
const CISPO: Paper = Paper {
    method: "CISPO",
    arxiv: "2506.13585",
    title: "MiniMax-M1: Scaling Test-Time Compute Efficiently with Lightning Attention",
    author: "{MiniMax}",
    year: 2025,
};
const GSPO: Paper = Paper {
    method: "GSPO",
    arxiv: "2507.18071",
    title: "Group Sequence Policy Optimization",
    author: "Zheng, Chujie",
    year: 2025,
};
const SAPO: Paper = Paper {
    method: "SAPO",
    arxiv: "2511.20347",
    title: "Soft Adaptive Policy Optimization",
    author: "Gao, Chang",
    year: 2025,
};
const GMPO: Paper = Paper {
    method: "GMPO",
    arxiv: "2507.20673",
    title: "Geometric-Mean Policy Optimization",
    author: "Zhao, Yuzhong",
    year: 2025,
};
const RLOO: Paper = Paper {
    method: "RLOO",
    arxiv: "2402.14740",
    title: "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs",
    author: "Ahmadian, Arash",
    year: 2024,
};
const REINFORCE_PLUS_PLUS: Paper = Paper {
    method: "REINFORCE++",
    arxiv: "2501.03262",
    title: "REINFORCE++: A Simple and Efficient Approach for Aligning Large Language Models",
    author: "Hu, Jian",
    year: 2025,
};

const ENTROPY_MECHANISM: Paper = Paper {
    method: "Clip-Cov and KL-Cov",
    arxiv: "2505.22617",
    title: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
    author: "Cui, Ganqu",
    year: 2025,
};
const DPPO: Paper = Paper {
    method: "DPPO",
    arxiv: "2602.04879",
    title: "Rethinking the Trust Region in LLM Reinforcement Learning",
    author: "Qi, Penghui",
    year: 2026,
};
const MAX_RL: Paper = Paper {
    method: "MaxRL",
    arxiv: "2602.02710",
    title: "Maximum Likelihood Reinforcement Learning",
    author: "Tajwar, Fahim",
    year: 2026,
};

impl Paper {
    /// Formats a BibTeX entry.
    pub fn bibtex(&self) -> String {
        let Self { arxiv, title, author, year, .. } = self;
        let name: String =
            author.split(',').next().unwrap_or(author).chars().filter(char::is_ascii_alphanumeric).collect();
        let key = format!("{}{year}", name.to_lowercase());
        format!(
            "@misc{{{key},\n  title = {{{{{title}}}}},\n  author = {{{author} and others}},\n  year = {{{year}}},\n  eprint = {{{arxiv}}},\n  archivePrefix = {{arXiv}},\n}}\n"
        )
    }
}

impl LossPlan {
    /// Returns the papers whose methods this loss and these advantages use, beginning with GRPO.
    pub fn papers(&self, advantage: AdvantageKind) -> Vec<Paper> {
        let whitens = matches!(advantage, AdvantageKind::Whitened | AdvantageKind::GroupCenterWhitened);
        let higher = matches!(self.surrogate, Surrogate::Clip { low, high, .. } if high > low);
        let each = [
            (true, GRPO),
            (self.aggregation == Aggregation::ConstantLength, DR_GRPO),
            (self.ratio == RatioLevel::Sequence, GSPO),
            (matches!(self.surrogate, Surrogate::Cispo { .. }), CISPO),
            (matches!(self.surrogate, Surrogate::Sapo { .. }), SAPO),
            (matches!(self.surrogate, Surrogate::GeometricMean { .. }), GMPO),
            (self.covariance != Covariance::Off, ENTROPY_MECHANISM),
            (matches!(self.surrogate, Surrogate::Dppo { .. }), DPPO),
            (advantage == AdvantageKind::LeaveOneOut, RLOO),
            (advantage == AdvantageKind::MaxRl, MAX_RL),
            (whitens, REINFORCE_PLUS_PLUS),
            (
                matches!(self.surrogate, Surrogate::Clip { .. })
                    && !whitens
                    && self.covariance == Covariance::Off
                    && (self.aggregation == Aggregation::TokenMeanGlobal
                        || higher && self.ratio == RatioLevel::Token),
                DAPO,
            ),
        ];
        each.into_iter().filter_map(|(has, paper)| has.then_some(paper)).collect()
    }
}

#[cfg(test)]
mod tests {
    use crate::recipe::RECIPES;

    #[test]
    fn every_recipe_cites_grpo_and_its_own_paper() {
        let of = |name: &str| {
            let recipe = RECIPES.iter().find(|recipe| recipe.name == name).unwrap();
            recipe.loss.papers(recipe.advantage).iter().map(|paper| paper.method).collect::<Vec<_>>()
        };
        assert_eq!(of("grpo"), ["GRPO"]);
        assert_eq!(of("bnpo"), ["GRPO"]);
        assert_eq!(of("dr_grpo"), ["GRPO", "Dr. GRPO"]);
        assert_eq!(of("dapo"), ["GRPO", "DAPO"]);
        assert_eq!(of("cispo"), ["GRPO", "CISPO"]);
        assert_eq!(of("gspo"), ["GRPO", "GSPO"]);
        assert_eq!(of("sapo"), ["GRPO", "SAPO"]);
        // The arXiv number in a recipe's source must be that of one of its papers.
        for recipe in RECIPES.iter().filter(|recipe| recipe.source.contains("arXiv")) {
            assert!(
                recipe.loss.papers(recipe.advantage).iter().any(|paper| recipe.source.contains(paper.arxiv)),
                "{}",
                recipe.name
            );
        }
    }

    #[test]
    fn an_entry_of_a_bibliography() {
        let entry = super::CISPO.bibtex();
        assert!(entry.starts_with("@misc{minimax2025,\n  title = {{MiniMax-M1: "), "{entry}");
        assert!(entry.ends_with("  author = {{MiniMax} and others},\n  year = {2025},\n  eprint = {2506.13585},\n  archivePrefix = {arXiv},\n}\n"), "{entry}");
    }
}
