from models.data.text_data_module import TextDataModule

__all__ = ["TextDataModule"]
